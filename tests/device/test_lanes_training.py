"""Training on lanes: the same bits whatever is late, no races, no growth, and failures that give leases back."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GPT2Config

from tests.device import lag
from tests.device.lanes_cases import mutated
from tests.device.training_on_lanes import launch, train
from tests.integration.support import training
from tests.integration.support.training import Result, Run, assert_bit_equal, store_config
from trainer_client.engine import Engine
from trainer_client.model.flat_group import FlatGroup
from trainer_client.step import gradients
from trainer_client.step.training_step import TrainingStep

# `make mutants` sets this, to run each case under each schedule; otherwise each case runs under two of them.
THOROUGH = "PARAMSERVER_ALL_SCHEDULES"
LATE = [name for name in lag.SCHEDULES if name != "nothing late"]
SOME_LATE = LATE if os.environ.get(THOROUGH) else ["all late", "random"]


def offloaded(directory: Path, stage: int = 3, **homes: str) -> dict[str, Any]:
    """Return a config; `homes` has the devices of offload_param and offload_optimizer."""
    sections = {f"offload_{kind}": {"device": home} for kind, home in homes.items()}
    return store_config(directory, "cpu") | {"zero_optimization": {"stage": stage, **sections}}


def fractions(directory: Path) -> dict[str, Any]:
    placement = {
        "parameters": {"device": 0.4, "nvme": 0.6},
        "gradients": {"device": 0.5, "host": 0.5},
        "optimizer": {"device": 0.3, "host": 0.3, "nvme": 0.4},
    }
    config = store_config(directory, placement=placement)
    return config | {"zero_optimization": {"stage": 3}}


RUNS: dict[str, Callable[[Path], Run]] = {
    "nvme, clipping": lambda path: Run(steps=3, clipping=0.5, schedule=True, config=store_config(path, "nvme")),
    "host, early updates": lambda path: Run(steps=3, config=store_config(path, "cpu")),
    "host, accumulation": lambda path: Run(steps=2, accumulation=3, config=store_config(path, "cpu")),
    "nvme, bf16, poisoned step": lambda path: Run(
        steps=3, precision="bf16", poisoned_step=1, config=store_config(path, "nvme")
    ),
    "streams": lambda path: Run(steps=2, prefer_streams=True, config=store_config(path, "nvme")),
    "states on the device": lambda path: Run(steps=2, config=offloaded(path)),
    "a part of the states on the device": lambda path: Run(steps=2, config=fractions(path)),
    "stage 2, optimizer in the store": lambda path: Run(steps=2, config=offloaded(path, 2, optimizer="cpu")),
    "conditional": lambda path: Run(model="conditional", steps=3, config=store_config(path, "nvme")),
}


@pytest.mark.parametrize("case", RUNS)
def test_lag_changes_no_bit(case: str, tmp_path: Path) -> None:
    prompt = train(RUNS[case](tmp_path / "prompt"), "nothing late")
    assert lag.races() == []
    for schedule in SOME_LATE:
        late = train(RUNS[case](tmp_path / schedule.replace(" ", "-")), schedule)
        assert lag.races() == []
        assert_bit_equal(late, prompt)


def test_sums_that_leave_the_device_between_micro_batches_have_the_same_bits(tmp_path: Path) -> None:
    run = Run(steps=2, accumulation=3, clipping=0.5)
    stay = train(replace(run, config=store_config(tmp_path / "stay", "cpu")), "nothing late")
    with mock.patch.object(gradients, "_SHARE_FOR_SUMS", 0.0):
        leave = train(replace(run, config=store_config(tmp_path / "leave", "cpu")), "all late")
    assert_bit_equal(leave, stay)


@pytest.mark.parametrize(
    "mutant",
    [
        "the out-lane does not wait for the values",
        "values are not kept until they are copied",
        "nobody waits for a copy out",
        "leases are released at once",
    ],
)
def test_training_shows_what_is_left_out(mutant: str, tmp_path: Path) -> None:
    run = Run(steps=2)
    right = train(replace(run, config=store_config(tmp_path / "right", "nvme")), "all late")
    with mutated(mutant):
        wrong = train(replace(run, config=store_config(tmp_path / "wrong", "nvme")), "all late")
    races = lag.races()
    lag.clear_races()
    assert races or not is_equal(wrong, right)


def is_equal(one: Result, other: Result) -> bool:
    try:
        assert_bit_equal(one, other)
    except AssertionError:
        return False
    return True


def test_two_ranks_have_the_same_bits_whatever_is_late(tmp_path: Path) -> None:
    cases = {
        "nvme": Run(steps=2, clipping=0.5, config=store_config(tmp_path / "nvme", "nvme")),
        "host": Run(steps=2, accumulation=2, config=store_config(tmp_path / "host", "cpu")),
    }
    runs = []
    for name, run in cases.items():
        for schedule in ("nothing late", *SOME_LATE):
            path = tmp_path / f"{name}-{schedule}".replace(" ", "-")
            section = run.config["paramserver"] | {"state_dir": str(path)}
            runs.append((replace(run, config=run.config | {"paramserver": section}), schedule))
    results = launch(runs, 2, tmp_path)
    each = len(results) // len(cases)
    for first in range(0, len(results), each):
        for late in results[first + 1 : first + each]:
            assert_bit_equal(late, results[first])


def test_the_device_allocates_nothing_more_after_the_second_step(tmp_path: Path) -> None:
    segments: list[int] = []
    make = TrainingStep.make

    def make_and_count(step: TrainingStep, number: int) -> bool:
        segments.append(lag.memory_counters().segments)
        return make(step, number)

    # Under this schedule the first step has as many tensors on the device at once as any step can have.
    with mock.patch.object(TrainingStep, "make", make_and_count):
        train(Run(steps=6, config=store_config(tmp_path / "run", "nvme")), "all late")
    assert segments[1:] == [segments[1]] * 5


@pytest.mark.parametrize("fails_at", [1, 3, 4])
def test_a_forward_without_memory_gives_its_leases_back_and_can_be_repeated(fails_at: int, tmp_path: Path) -> None:
    """Many training loops go on after an error of this kind, with a smaller batch."""
    run = Run(steps=3)
    right = train(replace(run, config=store_config(tmp_path / "right", "nvme")), "copies late")
    allocate, calls = FlatGroup.allocate, 0

    def allocate_or_fail(group: FlatGroup) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("there is no memory on this device")
        allocate(group)

    forward = Engine.forward

    def forward_again(engine: Engine, *arguments: Any, **named: Any) -> Any:
        try:
            return forward(engine, *arguments, **named)
        except torch.OutOfMemoryError:
            return forward(engine, *arguments, **named)

    with (
        mock.patch.object(FlatGroup, "allocate", allocate_or_fail),
        mock.patch.object(Engine, "forward", forward_again),
    ):
        repeated = train(replace(run, config=store_config(tmp_path / "repeated", "nvme")), "copies late")
    assert calls > fails_at
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


def test_copies_run_under_the_computation(tmp_path: Path) -> None:
    """In virtual time, for the eight blocks; the root's gradient is the last one, with nothing left to run under."""
    spans: list[lag.Span] = []
    speeds = {"COMPUTE": 4e8, "TO_DEVICE": 2e8, "TO_HOST": 2e8}
    deeper = mock.patch.object(training, "GPT2Config", lambda **fields: GPT2Config(**fields | {"n_layer": 8}))
    with deeper:
        config = store_config(tmp_path / "run", "nvme")
        train(Run(steps=3, config=config), "nothing late", lambda: recording(spans, **speeds), guarded=False)
    end = max(span.end for span in spans if span.engine == lag.Engine.COMPUTE)
    kernels = [span for span in spans if span.engine == lag.Engine.COMPUTE]
    copies = [span for span in spans if span.nbytes > 150_000 and span.begin < end]
    for engine in (lag.Engine.TO_DEVICE, lag.Engine.TO_HOST):
        of_blocks = [span for span in copies if span.engine == engine]
        assert len(of_blocks) >= 3 * 8
        assert lag.hidden_share([*kernels, *of_blocks], {engine}) > 0.9


def test_accumulated_gradients_leave_the_device_once_in_a_step(tmp_path: Path) -> None:
    def copied(accumulation: int) -> float:
        spans: list[lag.Span] = []
        run = Run(steps=1, accumulation=accumulation, config=store_config(tmp_path / str(accumulation)))
        train(run, "nothing late", lambda: recording(spans, TO_HOST=1e9), guarded=False)
        return sum(span.nbytes for span in spans if span.engine == lag.Engine.TO_HOST)

    once = copied(1)
    assert once > 0
    assert copied(4) < 1.01 * once
