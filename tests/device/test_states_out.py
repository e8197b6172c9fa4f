"""States whose home is the device: their commit is copied under the next step, and has the bits of its own step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from unittest import mock

import pytest
import torch
from torch import nn

from tests.device import lag, matrix, overlap
from tests.device.held_commits import commits_held
from tests.device.training_on_lanes import Lateness, train
from tests.integration.support.daemon import Daemon
from tests.integration.support.matrix_cells import run_of
from tests.integration.support.model_runs import config_of, start
from tests.integration.support.training import Result, Run, assert_bit_equal
from trainer_client.client.transport.later_commit import LaterCommit
from trainer_client.engine.engine import Engine
from trainer_client.training.model.states import PlacedStates

# Copies of states are 300 ms late, so that a commit ends only when the next step needs it.
LATE = Lateness(lane_ms={"beside": 300})
STEPS = 3

Runs = Callable[[str], Run]


def run_of_step_commits(address: str) -> Runs:
    """Return a function that makes a run of a new job, by a name of matrix_cells.PLACES; each step is committed."""
    numbers = itertools.count()

    def make(place: str) -> Run:
        run = run_of("bf16", place, 1, address, f"job {next(numbers)}")
        run.config["paramserver"]["durability"] = "step"
        return replace(run, steps=STEPS, accumulation=1)

    return make


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with matrix.store(tmp_path_factory.mktemp("store")) as daemon:
        yield run_of_step_commits(daemon.address)
        assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture(scope="module")
def right(runs: Runs) -> Result:
    """The result of a run without lag. It has the bits of all places, because on one rank the place changes none."""
    result = train(runs("zero-2"), "nothing late")
    assert lag.races() == []
    return result


def committed(run: Run) -> Result:
    """Return the states of the newest commit of a run's job, by a resume that has nothing to train."""
    result = train(run, "nothing late")
    assert result.resumed_step == run.steps
    assert result.losses == []
    return result


def assert_same_states(one: Result, other: Result) -> None:
    assert_bit_equal(replace(one, losses=[], norms=[]), replace(other, losses=[], norms=[]))


@contextmanager
def after_each_step(act: Callable[[Engine], None] = lambda _: None) -> Iterator[None]:
    """Call `act` after each step, while its commit is under way: the copies begin right before the call."""
    step, may_copy = Engine.step, Event()

    def step_and_act(engine: Engine) -> None:
        may_copy.clear()
        step(engine)
        pending = engine._commits._pending
        assert isinstance(pending, LaterCommit) and not pending.is_answered
        may_copy.set()
        act(engine)

    may_copy.set()
    with commits_held(may_copy), mock.patch.object(Engine, "step", step_and_act):
        yield


@pytest.mark.parametrize(
    "place", ["ddp", "zero-1", "zero-2", "zero-3", "zero-3 + fractions", "zero-3 + parameters nvme"]
)
def test_a_step_does_not_wait_for_its_commit_which_has_all_bits(place: str, runs: Runs, right: Result) -> None:
    run = runs(place)
    late = train(run, LATE, after_each_step)
    assert lag.races() == []
    assert_bit_equal(late, right)
    assert_same_states(committed(run), right)


def test_a_first_micro_batch_asks_for_gradients_after_the_vote_for_the_last_step(runs: Runs) -> None:
    """The vote ends the leases of the last step's gradients, of which a rank may hold one each."""
    # Without clipping by norm, updates begin in the backward pass, and keep the lease until the vote.
    run, other = (replace(runs("zero-3 + fractions"), accumulation=2, clipping=0.0) for _ in range(2))
    assert_bit_equal(train(run, LATE), train(other, "nothing late"))


@pytest.mark.parametrize("place", ["ddp", "zero-2"])
def test_parameters_that_the_script_changes_meanwhile_are_committed_as_the_step_left_them(
    place: str, runs: Runs, right: Result
) -> None:
    """Some scripts put averaged weights in place of the trained ones for an evaluation, for example."""

    @torch.no_grad()
    def change_for_a_while(engine: Engine) -> None:
        parameters = list(engine.module.parameters())
        trained = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.fill_(torch.nan)
        engine.wait_for_commit()
        for parameter, values in zip(parameters, trained, strict=True):
            parameter.copy_(values)

    run = runs(place)
    assert_bit_equal(train(run, LATE, lambda: after_each_step(change_for_a_while)), right)
    assert_same_states(committed(run), right)


def test_without_room_for_a_copy_parameters_are_handed_over_before_the_step_returns(runs: Runs, right: Result) -> None:

    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("there is no memory on this device")

    run = runs("zero-2")
    with mock.patch.object(PlacedStates, "_copy_on_device", fail):
        assert_bit_equal(train(run, LATE, after_each_step), right)
    assert_same_states(committed(run), right)


@pytest.mark.parametrize("place", ["zero-2", "zero-3 + fractions"])
def test_a_daemon_that_dies_while_a_commit_is_copied_changes_no_bit(place: str, right: Result, tmp_path: Path) -> None:
    daemons = [Daemon(tmp_path / "state", matrix.DAEMON)]
    restarts: list[int] = []

    def restart(engine: Engine) -> None:
        if engine.global_steps == 2:
            daemons[0].kill()
            daemons[0] = Daemon(tmp_path / "state", matrix.DAEMON)
        restarts[:] = [len(engine.daemon_restarts)]

    try:
        run = run_of_step_commits(daemons[0].address)(place)
        assert_bit_equal(train(run, LATE, lambda: after_each_step(restart), guarded=False), right)
        assert restarts == [1]
        assert_same_states(committed(run), right)
    finally:
        daemons[0].kill()


class Counting(nn.Module):
    """A model with a large buffer that each forward changes, and one that none changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("counts", torch.zeros(300, 300))
        self.register_buffer("mask", torch.ones(600, 601, dtype=torch.bool).tril())
        self.counts: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.counts.data[0, 0] += 1
        return self.linear(inputs).square().mean() + self.counts[0, 0]


@pytest.mark.parametrize("stage", [0, 3])
def test_large_buffers_on_the_device_go_on(stage: int, tmp_path: Path) -> None:
    with matrix.store(tmp_path) as daemon:
        config = config_of(daemon.address, "counting") | {"zero_optimization": {"stage": stage}}
        for begun in (0, STEPS):
            with start(model := Counting().to(torch.accelerator.current_accelerator()), config) as engine:
                assert engine.device.type != "cpu" and model.counts.device == engine.device
                assert int(model.counts[0, 0]) == begun
                for _ in range(STEPS):
                    engine.backward(engine(torch.ones(4, 8, device=engine.device)))
                    assert engine._commits._buffers.changed() == {"counts"}
                    engine.step()
                engine.wait_for_commit()
    assert lag.races() == []


def test_a_commit_lies_under_the_computation_of_the_next_step(tmp_path: Path) -> None:
    """In virtual time, where the computation of a step takes twice as long as the copies of its states."""
    (found,) = overlap.measure(tmp_path, [2.0], ["device"])["runs"].values()
    assert found["lanes"]["copy_seconds"]["out"] > 0.4 * found["lanes"]["compute_seconds"]
    assert found["lanes"]["hidden"]["out"] > 0.9
    assert found["one_stream"]["hidden"]["out"] == 0.0
