"""Training on lanes: the same bits whatever is late, no races, no growth, and failures that give leases back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config

import trainer_client
from tests.device import lag, matrix, matrix_chains
from tests.device.lanes_cases import mutated
from tests.device.matrix_cells import PART
from tests.device.matrix_rank import Task
from tests.device.mutant_programs import forward_without_memory, gradients_changed
from tests.device.tight_boundaries import Tower, tight_store, train_tower
from tests.device.training_on_lanes import Lateness, launch, registered_arena, train
from tests.integration.support import training
from tests.integration.support.daemon import Daemon
from tests.integration.support.matrix_cells import run_of
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import Result, Run, assert_bit_equal
from trainer_client.base.lanes.device_lanes import DeviceClock, DeviceLanes
from trainer_client.client.transport.activation_leases import ActivationLeases
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.config.loading import load_config
from trainer_client.plan.boundaries import OffloadRule
from trainer_client.plan.rehearsal import GradientRule, rehearse
from trainer_client.training.report import reporter
from trainer_client.training.report.step_report import StepReport, make_report
from trainer_client.training.step import gradients
from trainer_client.training.step.recall_depth import RecallDepth

LATE = [name for name in lag.SCHEDULES if name != "nothing late"]
SOME_LATE = LATE if lag.IS_THOROUGH else ["all late"]


# Makes the config of a run, which is a job of its own: on a tier, or with other sections than those of that tier.
Configs = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon of all runs, because one of each run's own would take more time than the run."""
    with matrix.store(tmp_path_factory.mktemp("store")) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture(scope="module")
def configs(store: Daemon) -> Configs:
    """The configs of new jobs."""
    numbers = itertools.count()

    def make(tier: str = "nvme", **sections: Any) -> dict[str, Any]:
        config = config_of(store.address, f"run-{next(numbers)}", tier)
        return config | sections | {"paramserver": config["paramserver"] | sections.get("paramserver", {})}

    return make


@pytest.fixture(scope="module")
def right(configs: Configs) -> Result:
    """The result of two steps without lag."""
    return train(Run(steps=2, config=configs("nvme")), "nothing late")


def offloaded(stage: int = 3, **homes: str) -> dict[str, Any]:
    """Return sections of a config; `homes` has the devices of offload_param and offload_optimizer."""
    sections = {f"offload_{kind}": {"device": home} for kind, home in homes.items()}
    return {"zero_optimization": {"stage": stage, **sections}}


FRACTIONS = {
    "zero_optimization": {"stage": 3},
    "paramserver": {
        "placement": {
            "parameters": {"device": 0.4, "nvme": 0.6},
            "gradients": {"device": 0.5, "host": 0.5},
            "optimizer": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        }
    },
}

RUNS: dict[str, Callable[[Configs], Run]] = {
    "nvme, clipping": lambda configs: Run(steps=3, clipping=0.5, schedule=True, config=configs("nvme")),
    "host, early updates": lambda configs: Run(steps=3, config=configs("cpu")),
    "host, accumulation": lambda configs: Run(steps=2, accumulation=3, config=configs("cpu")),
    "nvme, bf16, poisoned step": lambda configs: Run(
        steps=3, precision="bf16", with_masters=True, poisoned_step=1, config=configs("nvme")
    ),
    "streams": lambda configs: Run(steps=2, prefer_streams=True, config=configs("nvme")),
    "states on the device": lambda configs: Run(steps=2, config=configs(**offloaded())),
    "a part of the states on the device": lambda configs: Run(steps=2, config=configs(**FRACTIONS)),
    "stage 2, optimizer in the store": lambda configs: Run(steps=2, config=configs(**offloaded(2, optimizer="cpu"))),
    "conditional": lambda configs: Run(model="conditional", steps=3, config=configs("nvme")),
    "nvme, dropout, accumulation": lambda configs: Run(
        steps=2, dropout=0.1, accumulation=2, clipping=0.5, schedule=True, config=configs("nvme")
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_lag_changes_no_bit_and_they_are_those_of_the_cpu(case: str, configs: Configs) -> None:
    run = RUNS[case](configs)
    prompt = train(run, "nothing late")
    assert lag.races() == []
    if not run.dropout:
        # The device has another generator than the CPU, and no fused attention.
        with sdpa_kernel(SDPBackend.MATH):
            assert_bit_equal(prompt, training.train(replace(run, through_store=False)))
    for schedule in SOME_LATE:
        late = train(RUNS[case](configs), schedule)
        assert lag.races() == []
        assert run.prefer_streams or lag.most_outstanding() > 10
        assert_bit_equal(late, prompt)


def test_sums_that_leave_the_device_between_micro_batches_have_the_same_bits(configs: Configs) -> None:
    run = Run(steps=2, accumulation=3, clipping=0.5)
    stay = train(replace(run, config=configs("cpu")), "nothing late")
    with mock.patch.object(gradients, "_SHARE_FOR_SUMS", 0.0):
        leave = train(replace(run, config=configs("cpu")), "all late")
    assert_bit_equal(leave, stay)


def test_gradients_that_do_not_fit_into_the_host_budget_have_the_same_bits(configs: Configs, tmp_path: Path) -> None:
    """Without a share of the device, the sums leave it, and are parked, between micro-batches."""
    run = Run(layers=12, steps=2, accumulation=2, clipping=0.5)
    plenty = train(replace(run, config=configs("nvme")), "nothing late")
    with Daemon(tmp_path / "state", {"host_budget": 3584 << 10, "nvme_budget": "1GiB"}) as daemon:
        for share in (0.0, 0.5):
            with mock.patch.object(gradients, "_SHARE_FOR_SUMS", share):
                config = config_of(daemon.address, f"spilled with {share}", "nvme")
                small = train(replace(run, config=config), "all late")
            assert lag.races() == []
            assert_bit_equal(small, plenty)


@pytest.mark.parametrize(
    "mutant",
    [
        "the out-lane does not wait for the values",
        "values are not kept until they are copied",
        "nobody waits for a copy out",
        "leases are released at once",
    ],
)
def test_training_shows_what_is_left_out(mutant: str, right: Result, configs: Configs) -> None:
    with mutated(mutant):
        wrong = train(Run(steps=2, config=configs("nvme")), "all late")
    races = lag.races()
    lag.clear_races()
    assert races or not is_equal(wrong, right)


def is_equal(one: Result, other: Result) -> bool:
    try:
        assert_bit_equal(one, other)
    except AssertionError:
        return False
    return True


def test_two_ranks_have_the_same_bits_whatever_is_late(configs: Configs, tmp_path: Path) -> None:
    cases: list[Callable[[], Run]] = [
        lambda: Run(steps=2, clipping=0.5, config=configs("nvme")),
        lambda: Run(steps=2, accumulation=2, config=configs("cpu")),
    ]
    schedules = ("nothing late", *SOME_LATE)
    results = launch([(case(), schedule) for case in cases for schedule in schedules], 2, tmp_path)
    for first in range(0, len(results), len(schedules)):
        prompt, *late = results[first : first + len(schedules)]
        for other in late:
            assert_bit_equal(other, prompt)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_device_allocates_no_more_from_step_to_step(ranks: int, store: Daemon, tmp_path: Path) -> None:
    places = ("zero-3 + everything nvme", "zero-3 + fractions", "zero-1 + optimizer nvme")
    runs = {p: run_of("fp32, each micro-batch", p, ranks, store.address, f"segments {ranks} {p}") for p in places}
    # Under this schedule the first step has as many tensors on the device at once as any step can have.
    late = asdict(Lateness(all_ms=20))
    tasks = [Task(name=p, run=asdict(replace(run, steps=5)), lateness=late) for p, run in runs.items()]
    lines, failures = matrix.run_tasks(tasks, ranks, tmp_path)
    assert failures == []
    for line in lines:
        first, second, *_, last = line["segments"]
        assert first > 0
        # A gradient stays on the device until the other rank has sent its own. So with two ranks the same bytes may lie
        # in more places in the third step than in the second, and once need another segment.
        assert last - second <= (0 if ranks == 1 else 1), line
        assert line["left_bytes"] == [0, 0]


def test_a_part_of_the_matrix_has_the_same_bits_whatever_is_late(store: Daemon, tmp_path: Path) -> None:
    """`make device-matrix` has all of it."""
    report = matrix.Report()
    matrix.play_cells(PART, 2, 1, tmp_path, store.address, report, brief=False)
    found = report.conclude()
    assert found["problems"] == []
    assert found["runs"] == {"2 ranks": 4 * len(PART)}


def test_three_ranks_share_the_two_devices(store: Daemon, tmp_path: Path) -> None:
    report = matrix.Report()
    matrix.play_cells(PART[:1], 3, 1, tmp_path, store.address, report, brief=True)
    found = report.conclude()
    assert found["problems"] == []
    assert found["runs"] == {"3 ranks": 2}


@pytest.mark.parametrize("name", ["killed, 1 rank, nvme", "killed, 1 rank, device"])
def test_a_job_that_is_killed_under_late_copies_has_the_bits_of_one_that_is_not(
    name: str, store: Daemon, tmp_path: Path
) -> None:
    shown = matrix_chains.play(store.address, tmp_path, 0, 1, random.Random(1), [name])
    assert shown[name]["problems"] == []
    assert shown[name]["kills"] >= 1


def test_states_that_change_while_gradients_leave_the_device_are_those_that_the_step_updates(configs: Configs) -> None:
    """The commit of the change once refused the updates of gradients that left the device only after it."""
    run = Run(steps=2, accumulation=2)
    with gradients_changed():
        prompt = train(replace(run, config=configs("nvme")), "nothing late")
        late = train(replace(run, config=configs("nvme")), Lateness(lane_ms={"out": 1000}))
    assert_bit_equal(late, prompt)


@pytest.mark.parametrize("fails_at", [1, 3, 4])
def test_a_forward_without_memory_gives_its_leases_back_and_can_be_repeated(
    fails_at: int, right: Result, configs: Configs
) -> None:
    """Many training loops go on after an error of this kind, with a smaller batch."""
    with forward_without_memory(fails_at):
        repeated = train(Run(steps=2, config=configs("nvme")), "copies late")
    assert_bit_equal(repeated, right)


def recording(spans: list[lag.Span], **bytes_per_second: float) -> ExitStack:
    """Return a context that collects the spans of the tasks in virtual time; the engines have these speeds."""
    recorder = ExitStack()
    # `found` is filled when its context ends, which is before this call.
    recorder.callback(lambda: spans.extend(found))
    found = recorder.enter_context(lag.recorded())
    for engine, speed in bytes_per_second.items():
        lag.set_speed(lag.Engine[engine], bytes_per_second=speed)
    return recorder


def test_copies_run_under_the_computation(configs: Configs) -> None:
    """In virtual time, for the eight blocks; the root's gradient is the last one, with nothing left to run under."""
    spans: list[lag.Span] = []
    speeds = {"COMPUTE": 4e8, "TO_DEVICE": 2e8, "TO_HOST": 2e8}
    deeper = mock.patch.object(training, "GPT2Config", lambda **fields: GPT2Config(**fields | {"n_layer": 8}))
    with deeper:
        run = Run(steps=3, config=configs("nvme"))
        train(run, "nothing late", lambda: recording(spans, **speeds), guarded=False)
    end = max(span.end for span in spans if span.engine == lag.Engine.COMPUTE)
    kernels = [span for span in spans if span.engine == lag.Engine.COMPUTE]
    copies = [span for span in spans if span.nbytes > 150_000 and span.begin < end]
    for engine in (lag.Engine.TO_DEVICE, lag.Engine.TO_HOST):
        of_blocks = [span for span in copies if span.engine == engine]
        assert len(of_blocks) >= 3 * 8
        assert lag.hidden_share([*kernels, *of_blocks], {engine}) > 0.9


def test_the_reports_of_steps_have_the_times_of_the_device(configs: Configs) -> None:
    """In virtual time. The host waits at each poll, so that no thread's speed says which report a kernel is in."""
    spans: list[lag.Span] = []
    reports: list[StepReport] = []
    poll = DeviceClock.poll

    def wait_and_poll(clock: DeviceClock) -> None:
        torch.accelerator.synchronize()
        poll(clock)

    def keep(*arguments: Any) -> StepReport:
        reports.append(make_report(*arguments))
        return reports[-1]

    def products_recorded() -> ExitStack:
        lag.set_speed(lag.Engine.COMPUTE, flops_per_second=1e9)
        return recording(spans, TO_DEVICE=2e8)

    kept = mock.patch.object(reporter, "make_report", keep)
    with kept, mock.patch.object(DeviceClock, "poll", wait_and_poll):
        train(Run(steps=4, config=configs("nvme")), "nothing late", products_recorded, guarded=False)
    of_a_step = sum(span.end - span.begin for span in spans if span.engine == lag.Engine.COMPUTE) / 4
    # A report has the last kernels of the step before, and not those of its own step.
    assert [report.resources["compute"] for report in reports[1:]] == pytest.approx([of_a_step] * 3, rel=0.02)
    assert reports[-1].bandwidths["copied"] == pytest.approx(2e8, rel=0.01)


def test_accumulated_gradients_leave_the_device_once_in_a_step(configs: Configs) -> None:
    def copied(accumulation: int) -> float:
        spans: list[lag.Span] = []
        run = Run(steps=1, accumulation=accumulation, config=configs("nvme"))
        train(run, "nothing late", lambda: recording(spans, TO_HOST=1e9), guarded=False)
        return sum(span.nbytes for span in spans if span.engine == lag.Engine.TO_HOST)

    once = copied(1)
    assert once > 0
    assert copied(4) < 1.01 * once


def checkpointed(configs: Configs, checkpointing: Any) -> Run:
    return Run(steps=2, layers=6, dropout=0.1, accumulation=2, checkpointing=checkpointing, config=configs())


@pytest.fixture(scope="module")
def kept(configs: Configs) -> dict[str, Result]:
    """The results of runs whose boundaries stay on the device."""
    results = {}
    for how in ("reentrant", "non-reentrant"):
        results[how] = train(checkpointed(configs, how), "nothing late")
        assert lag.races() == []
    return results


@pytest.mark.parametrize(
    ("schedule", "checkpointing", "recompute"),
    [("all late", "reentrant", False), ("random", "non-reentrant", False), ("all late", "non-reentrant", True)],
)
def test_boundaries_of_checkpoints_in_the_store_have_the_same_bits(
    configs: Configs, kept: dict[str, Result], schedule: str, checkpointing: str, recompute: bool
) -> None:
    section = {"activations": {"offload": True, "smallest": 1024, "recompute": recompute}}
    moved = replace(checkpointed(configs, checkpointing), config=configs(paramserver=section))
    parked: list[int] = []
    park = ActivationLeases.park

    def count(leases: ActivationLeases, leased: LeasedBytes) -> LeasedBytes:
        parked.append(leased.nbytes)
        return park(leases, leased)

    with mock.patch.object(ActivationLeases, "park", count):
        found = train(moved, schedule)
    # In each forward all boundaries leave but for the newest one or two. With `recompute`, half of them are not kept.
    assert 2 * 2 * (3 - 2) <= len(parked) <= 2 * 2 * 3 if recompute else len(parked) >= 2 * 2 * (6 - 2)
    assert_bit_equal(found, kept[checkpointing])


def test_a_boundary_is_recalled_only_when_the_call_that_parks_it_is_made(
    configs: Configs, kept: dict[str, Result]
) -> None:
    """Copies that are done owe their calls until the trainer looks, or here until it waits for them."""
    section = {"activations": {"offload": True, "smallest": 1024, "recompute": False}}
    moved = replace(checkpointed(configs, "non-reentrant"), config=configs(paramserver=section))
    with mock.patch.object(DeviceLanes, "poll", lambda _: None):
        found = train(moved, "nothing late")
    assert_bit_equal(found, kept["non-reentrant"])


def test_boundaries_come_back_if_the_store_has_room_for_one_at_a_time(tmp_path: Path) -> None:
    """Backward takes a boundary while the device still copies the one before from the only room that there is."""
    results, limits = [], mock.Mock()
    with tight_store(tmp_path) as daemon, mock.patch.object(RecallDepth, "limit", limits):
        for offload in (False, True):
            lag.reset()
            lag.SCHEDULES["copies late"].use()
            results.append(train_tower(daemon.address, f"offload {offload}", offload=offload))
            assert lag.races() == []
            assert limits.called == offload
            # The frames of the refused calls, and the boundaries in them, do not stay until garbage is collected.
            assert lag.memory_counters().allocated_bytes < BOUNDARY
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


ROWS = 2048
BOUNDARY = ROWS * 64 * 4
# The bytes of the parameters of a block, and of their gradients.
BLOCK = 4 * (2 * 64 * 256 + 256 + 64)
NO_GRADIENTS = GradientRule(group_of={}, full_bytes={}, partition_bytes={}, kept_bytes={}, is_reduced_at_once=True)


@pytest.mark.parametrize("schedule", ["nothing late", "copies late"])
def test_boundaries_in_the_store_leave_the_device_as_much_memory_as_a_plan_says(
    configs: Configs, schedule: str
) -> None:
    planned, measured = [], []
    for offload in (True, False):
        section = {"activations": {"offload": offload, "smallest": BOUNDARY}}
        raw = configs(paramserver=section, optimizer={"type": "AdamW"}, gradient_clipping=0.0)
        rule = OffloadRule.of(load_config(raw, {}))
        found = rehearse(Tower, lambda _: {"tokens": torch.zeros(ROWS, 64)}, None, rule)
        live = found.peak_bytes(NO_GRADIENTS, in_heap=False)
        planned.append(live + 3 * max(found.boundaries, default=0))
        lag.reset()
        lag.SCHEDULES[schedule].use()
        with registered_arena():
            engine, *_ = trainer_client.initialize(model=Tower().to("lag"), config=raw)
            with engine:
                for _ in range(3):
                    torch.accelerator.reset_peak_memory_stats()
                    engine.backward(engine(torch.randn(ROWS, 64).to("lag")))
                    engine.step()
                    lag.synchronize()
                    peak = lag.memory_counters().peak_bytes
        measured.append(peak)
    # If no copy is late, the plan's three boundaries on their way need not be there, and one of the two that stay. At
    # one of the two peaks, the device may have parameters or gradients of another unit than at the other one.
    assert planned[1] - planned[0] >= 4 * BOUNDARY
    assert -BLOCK <= (measured[1] - measured[0]) - (planned[1] - planned[0]) <= 4 * BOUNDARY
