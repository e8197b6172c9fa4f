"""Jobs whose gradients do not fit into the host budget: the same bits as with plenty of memory, in a bounded budget."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import trainer_client
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import MIB, Daemon, admin_of, tiers
from tests.integration.support.outliving import differences, make_plan, outlive
from tests.integration.support.parking import PLENTY, assert_nothing_left, small_and_plenty
from tests.integration.support.ranks import END_SECONDS, Launch
from tests.integration.support.store_client import Clients
from tests.integration.support.training import (
    Run,
    assert_bit_equal,
    build_model,
    engine_config,
    make_optimizer,
    micro_batches,
    train_through_store,
    train_with_masters,
)
from tests.integration.support.training import launch as launch_runs
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client import StoreClientSync
from trainer_client.client.transport.pending_calls import RepeatedCall
from trainer_client.training.step.gradient_memory import LeasedMemory

LAYERS = 12
# The optimizer's smallest buffers are 1.75 MiB. Four layers' gradients and three layers take 1.4 MB, and all gradients
# 2.5 MB, for which the daemon would ask for 5 MB.
SMALL = 3584 << 10


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon with too little memory for all gradients, and one with plenty."""
    with small_and_plenty(tmp_path_factory.mktemp("gradients"), SMALL) as both:
        yield both


def config(daemon: Daemon, job: str, stage: int, **section: Any) -> dict[str, Any]:
    offload = {"device": "nvme"}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": offload}
    zero |= {"offload_param": offload} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "paramserver": {"address": daemon.address, "job": job, "durability": "step", **section},
    }


# The stage, the run, and the numbers of ranks with which it is trained.
RUNS = {
    "stage 1": (1, Run(), (1,)),
    "stage 2": (2, Run(), (2,)),
    "stage 3": (3, Run(), (1, 2)),
    "stage 2, clipping": (2, Run(clipping=0.5), (1,)),
    # A gradient of three micro-batches is spilled, read and added to, and spilled again.
    "stage 1, accumulation": (1, Run(accumulation=3), (1,)),
    "stage 3, clipping, accumulation": (3, Run(clipping=0.5, accumulation=3), (1, 2)),
    "stage 1, clipping, boundary": (1, Run(clipping=0.5, accumulation=2, schedule_of_reduction="boundary"), (2,)),
    "stage 3, clipping": (3, Run(clipping=0.5), ()),
    "stage 3, fp16 skip": (3, Run(precision="fp16", poisoned_step=1, clipping=0.5), (1,)),
    "stage 2, fp16 skip, accumulation": (2, Run(precision="fp16", poisoned_step=1, accumulation=2), (2,)),
    "stage 3, bf16, checkpointed": (3, Run(precision="bf16", checkpointing="non-reentrant", clipping=0.5), (2,)),
    "stage 3, streams": (3, Run(prefer_streams=True, clipping=0.5, accumulation=2), (1,)),
    "stage 3, final": (3, Run(accumulation=2), (2,)),
    "stage 2, fp16 skip, final": (2, Run(precision="fp16", poisoned_step=1), (1,)),
}


def run_of(daemon: Daemon, name: str, world_size: int) -> Run:
    stage, run, _ = RUNS[name]
    job = f"{name.replace(', ', '-').replace(' ', '-')}-{world_size}"
    # A step follows the one that is skipped.
    steps = 2 if run.poisoned_step is None else run.poisoned_step + 2
    section = {"early_updates": "final"} if "final" in name else {}
    return replace(run, layers=LAYERS, steps=steps, with_masters=True, config=config(daemon, job, stage, **section))


@pytest.mark.parametrize("world_size", [1, 2])
def test_spilled_gradients_give_the_bits_of_plenty_of_memory(
    daemons: tuple[Daemon, Daemon], tmp_path: Path, world_size: int
) -> None:
    names = [name for name, (_, _, sizes) in RUNS.items() if world_size in sizes]
    written = [tiers(daemon.address)[1].bytes_written for daemon in daemons]
    runs = [run_of(daemon, name, world_size) for daemon in daemons for name in names]
    results = launch_runs(runs, world_size, tmp_path)
    small, plenty = (
        tiers(daemon.address)[1].bytes_written - before for daemon, before in zip(daemons, written, strict=True)
    )
    for name, found, expected in zip(names, results[: len(names)], results[len(names) :], strict=True):
        try:
            assert_bit_equal(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    # Both have written the same versions, and only the small one has written gradients.
    assert small > plenty + len(names) * MIB
    for daemon in daemons:
        assert_nothing_left(daemon)


@pytest.mark.parametrize("name", ["stage 3, clipping", "stage 3, fp16 skip"])
def test_spilled_gradients_give_the_bits_of_torch(daemons: tuple[Daemon, Daemon], name: str) -> None:
    run = run_of(daemons[0], name, 1)
    run = replace(run, config=run.config | {"paramserver": run.config["paramserver"] | {"job": f"torch {name}"}})
    assert_bit_equal(train_through_store(run), train_with_masters(run))
    assert_nothing_left(daemons[0])


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_the_daemon_is_killed_with_spilled_gradients_and_the_run_goes_on(tmp_path: Path, clipping: float) -> None:
    """The ranks have kept copies, which they hand to the next daemon."""
    section = {"durability": "step"}
    job = {
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        "paramserver": section,
    }
    fields: dict[str, Any] = {"steps": 3, "layers": LAYERS, "accumulation": 2}
    whole = outlive(make_plan(tmp_path / "whole", job, **fields, daemon={"host_budget": PLENTY}), 2)
    kills = [(2, "after backward 1"), (3, "backward")]
    small = {"host_budget": 4 * MIB}
    found = outlive(make_plan(tmp_path / "small", job, **fields, daemon=small, kills=kills), 2)
    assert differences(found, whole) == []
    assert all(len(result["restarts"]) >= 1 for result in found)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "small", {"host_budget": SMALL, "nvme_budget": "1GiB"}) as daemon:
        yield daemon


@contextmanager
def training(run: Run, directory: Path) -> Iterator[Launch]:
    """Start a run of one rank."""
    plan = directory / "runs.json"
    plan.write_text(json.dumps([asdict(run)]))
    with Launch("tests.integration.support.training", 1, (plan, directory / "results.pt"), directory) as started:
        yield started


def wait_for_spilled_gradients(daemon: Daemon, launch: Launch, step: int) -> None:
    """Wait until gradients are spilled in a step after `step`."""
    until = time.monotonic() + END_SECONDS
    # All looks use one channel, so that a look need not connect anew.
    with admin_of(daemon.address) as admin:
        while True:
            assert time.monotonic() < until and launch.is_whole, launch.output()
            jobs = admin.ListJobs(admin_pb.ListJobsRequest(), timeout=30).jobs
            found = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=30).tiers
            spilled = {tier.tier: tier.gradient_bytes for tier in found}
            if any(job.committed_step > step for job in jobs) and spilled[pb.TIER_NVME]:
                return
            time.sleep(0.002)


@pytest.mark.parametrize("act", ["fetch_ahead", "park", "free"])
def test_memory_may_be_given_back_by_what_runs_while_it_is_waited_for(
    daemons: tuple[Daemon, Daemon], monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """On an accelerator, a wait for memory runs what is to be done after copies, and that may use the same memory."""
    memories: list[LeasedMemory] = []
    init = LeasedMemory.__init__

    def note(memory: LeasedMemory, *arguments: Any) -> None:
        init(memory, *arguments)
        memories.append(memory)

    monkeypatch.setattr(LeasedMemory, "__init__", note)
    run = run_of(daemons[0], "stage 3", 1)
    section = run.config["paramserver"] | {"job": f"given back, {act}"}
    model = build_model(run)
    engine, *_ = trainer_client.initialize(
        model=model, optimizer=make_optimizer(model, run)[0], config=run.config | {"paramserver": section}
    )
    with ExitStack() as ending:
        ending.callback(engine.close_without_commit)
        memory = memories[1]
        memory.start(1)
        memory.wait().data.fill_(7)
        assert memory.park(sent=None) is not None
        acts = {"fetch_ahead": memory.fetch_ahead, "park": partial(memory.park, sent=None), "free": memory.free}
        ran: list[str] = []

        def run_act() -> None:
            if not ran:
                ran.append(act)
                acts[act]()

        # The store answers at once here, and never on an accelerator whose leases take all room.
        monkeypatch.setattr(RepeatedCall, "is_answered", property(lambda _: False))
        monkeypatch.setattr(memory._lanes, "finish_copies_in", run_act)
        for _ in range(2):
            leased = memory.wait()
            assert ran == [act]
            assert leased.parked is None
            assert leased.data.numel() > 0
            assert act == "free" or bool((leased.data == 7).all())
        memory.free()
    assert_nothing_left(daemons[0])


def test_gradients_leave_host_memory_that_holds_them_all_but_has_no_room_for_the_next_one(tmp_path: Path) -> None:
    """The admission has counted the room that a reader's leases take, so the store did not ask to park gradients."""
    config = {"host_budget": 6 * MIB, "nvme_budget": "1GiB", "admission_timeout_seconds": 20.0}
    with Daemon(tmp_path / "state", config) as daemon, StoreClientSync.connect(daemon.address) as client:
        values = {name: torch.randn(5 * MIB // 16) for name in ("first", "second")}
        with client.open("held", values) as job:
            job.put(values)
            job.commit()
        with client.read("held") as reader, admin_of(daemon.address) as admin:
            reader.prefetch(values)
            # The copies that are not leased are evicted.
            wait_until(
                lambda: (
                    admin.EvictCopies(admin_pb.EvictCopiesRequest(all_jobs=True))
                    and tiers(daemon.address)[0].used_bytes >= 10 * MIB // 4
                )
            )
            run = run_of(daemon, "stage 3, clipping", 1)
            found = train_through_store(run)
            assert torch.equal(reader.get("first"), values["first"])
        assert_bit_equal(found, train_with_masters(run))
        assert_nothing_left(daemon)


def test_a_rank_is_killed_with_spilled_gradients(small: Daemon, tmp_path: Path) -> None:
    run = replace(run_of(small, "stage 3, clipping", 1), steps=1000)
    with training(run, tmp_path) as launch:
        wait_for_spilled_gradients(small, launch, 1)
        launch.ranks[0].kill()
    assert_nothing_left(small)


def test_the_daemon_is_killed_right_before_gradients_that_do_not_fit_are_handed_over(tmp_path: Path) -> None:
    """The rank brings all of them to the next daemon, which has no more room for them than the last one."""
    config = {"host_budget": SMALL, "nvme_budget": "1GiB", "admission_timeout_seconds": 10.0}
    with ExitStack() as daemons:
        daemon = daemons.enter_context(Daemon(tmp_path / "state", config))
        run = replace(run_of(daemon, "stage 3, clipping", 1), steps=3, layers=2 * LAYERS)
        model = build_model(run)
        optimizer, _ = make_optimizer(model, run)
        engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=engine_config(run))
        with engine:
            torch.manual_seed(3)
            for step, tokens in enumerate(micro_batches(run.steps, 0, 1), start=1):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                if step == 2:
                    daemon.kill()
                    daemon = daemons.enter_context(Daemon(tmp_path / "state", config))
                    wait_until(lambda: len(engine.daemon_restarts) == 1)
                engine.step()
            weights = engine.full_state_dict()
        assert_nothing_left(daemon)
    expected = train_with_masters(run).weights
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_the_daemon_is_killed_with_spilled_gradients_that_no_rank_has_kept(small: Daemon, tmp_path: Path) -> None:
    """The run ends with an error that names the key; the next one resumes, with the bits of a run without a kill."""
    run = replace(run_of(small, "stage 3, clipping", 1), steps=20)
    section = run.config["paramserver"] | {"kept_gradients": 0}
    run = replace(run, config=run.config | {"paramserver": section})
    with training(run, tmp_path) as launch:
        wait_for_spilled_gradients(small, launch, 2)
        small.kill()
        with Daemon(tmp_path / "small", {"host_budget": SMALL, "nvme_budget": "1GiB"}) as again:
            assert_nothing_left(again)
            assert launch.wait(END_SECONDS) == [1]
            assert "kept_gradients" in launch.output()
            (found,) = launch_runs([run], 1, tmp_path)
            assert_nothing_left(again)
            whole = train_with_masters(run)
    assert found.resumed_step >= 3
    steps = found.resumed_step
    assert_bit_equal(found, replace(whole, losses=whole.losses[steps:], norms=whole.norms[steps:]))


def test_the_budget_that_is_asked_for_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    asked: set[int] = set()
    for layers in (8, 32):
        layout = Layout(name="deep", numels=(65_537,), groups=tuple(f"block.{i}" for i in range(layers)))
        config = {"host_budget": 3584 << 10, "nvme_budget": "1GiB"}
        with Daemon(tmp_path / str(layers), config) as daemon, Clients(daemon.address) as clients:
            rank = clients.rank(layout)
            rank.open()
            with pytest.raises(grpc.RpcError, match="host_budget") as refused:
                rank.register()
            assert isinstance(refused.value, grpc.Call)
            found = re.search(r"raise host_budget to at least (\d+)MiB,", refused.value.details() or "")
            assert found is not None
            asked.add(int(found[1]))
    assert len(asked) == 1


def test_spilled_gradients_are_read_changed_and_clipped_between_backward_and_step(
    daemons: tuple[Daemon, Daemon],
) -> None:
    found = []
    for daemon in daemons:
        run = replace(run_of(daemon, "stage 3", 1), layers=LAYERS)
        section = run.config["paramserver"] | {"job": "changed by hand"}
        model = build_model(run)
        engine, *_ = trainer_client.initialize(
            model=model, optimizer=make_optimizer(model, run)[0], config=run.config | {"paramserver": section}
        )
        names = [name for name, _ in model.named_parameters()]
        with engine:
            values: list[torch.Tensor] = []
            for number, batch in enumerate(micro_batches(3)):
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                gradients = [engine.get_full(name, "grad") for name in names]
                values += [gradient.clone() for gradient in gradients if gradient is not None]
                engine.set_full(names[number + 5], "grad", torch.full_like(values[-len(names) + number + 5], 0.01))
                if number == 1:
                    values.append(torch.tensor(engine.clip_grad_norm_(0.5)))
                engine.step()
            values += engine.full_state_dict().values()
        found.append(values)
    assert len(found[0]) == len(found[1]) > 3 * len(names)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert_nothing_left(daemons[0])


@pytest.mark.parametrize("prefer_streams", [False, True], ids=["arena", "streams"])
def test_gradients_that_are_read_after_a_restart_of_the_daemon_are_those_of_the_backward_pass(
    daemons: tuple[Daemon, Daemon], tmp_path: Path, prefer_streams: bool
) -> None:
    """Their early updates were begun in the daemon that died, and the next one has other leases for them."""

    def train(daemon: Daemon, restart: Callable[[], None]) -> dict[str, torch.Tensor]:
        run = run_of(daemon, "stage 3", 1)
        section = run.config["paramserver"] | {"job": f"read after a restart {prefer_streams}"}
        model = build_model(run)
        engine = trainer_client.initialize(
            model=model,
            optimizer=make_optimizer(model, run)[0],
            config=run.config | {"paramserver": section},
            prefer_streams=prefer_streams,
        )[0]
        with engine:
            for number, batch in enumerate(micro_batches(3)):
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                if number == 1:
                    restart()
                    for name, _ in model.named_parameters():
                        engine.get_full(name, "grad")
                engine.step()
            return engine.full_state_dict()

    expected = train(daemons[1], lambda: None)
    started = [Daemon(tmp_path / "again", {"host_budget": 4 * MIB, "nvme_budget": "1GiB"})]

    def restart() -> None:
        started[0].kill()
        started.append(Daemon(tmp_path / "again", {"host_budget": 4 * MIB, "nvme_budget": "1GiB"}))

    try:
        found = train(started[0], restart)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        assert_nothing_left(started[-1])
    finally:
        for daemon in started:
            daemon.kill()
