"""After a kill of trainers, the daemon or all of them in mid-step, a run goes on from the last committed step and ends
with the same bits as an uninterrupted run.

Where only the daemon is killed, the trainers go on without a restart. test_outliving.py tests that case further.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.integration.support.crash_run import Plan
from tests.integration.support.daemon import Daemon
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import END_SECONDS, Launch
from tests.integration.support.training import store_config

STEPS = 9
KILLED_AT = 5
WORLD_SIZE = 2


@contextmanager
def launched(plan: Plan) -> Iterator[Launch]:
    directory = Path(plan.directory)
    directory.mkdir(parents=True, exist_ok=True)
    plan_file = directory / "plan.json"
    plan_file.write_text(json.dumps(asdict(plan)))
    with Launch("tests.integration.support.crash_run", WORLD_SIZE, (plan_file,), directory) as launch:
        yield launch


def wait_for_step(launch: Launch, plan: Plan, step: int) -> None:
    """Wait until every rank is about to hand over the gradients of `step`."""
    deadline = time.monotonic() + END_SECONDS
    files = [plan.progress_file(rank) for rank in range(WORLD_SIZE)]
    while not all(file.exists() and f"{step}\n" in file.read_text() for file in files):
        assert launch.is_whole, launch.output()
        assert time.monotonic() < deadline, launch.output()
        time.sleep(0.001)


def make_plan(directory: Path, device: str) -> Plan:
    return Plan(directory=str(directory), steps=STEPS, config=store_config(directory / "state", device))


def run_to_the_end(plan: Plan) -> dict[str, torch.Tensor]:
    with launched(plan) as launch:
        assert launch.wait(END_SECONDS) == [0] * WORLD_SIZE, launch.output()
    weights: dict[str, torch.Tensor] = torch.load(plan.weights_file)
    return weights


def daemon_of(plan: Plan) -> int:
    return int((Path(plan.directory) / "state" / "lock").read_text())


def kill_one_trainer(launch: Launch, plan: Plan) -> None:
    launch.ranks[1].kill()


def kill_all_trainers(launch: Launch, plan: Plan) -> None:
    for rank in launch.ranks:
        rank.kill()


def kill_daemon(launch: Launch, plan: Plan) -> None:
    os.kill(daemon_of(plan), signal.SIGKILL)


def kill_everything(launch: Launch, plan: Plan) -> None:
    kill_daemon(launch, plan)
    kill_all_trainers(launch, plan)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    directory = tmp_path_factory.mktemp("whole")
    with Daemon(directory / "state", {"host_budget": "128MiB", "nvme_budget": "1GiB"}) as daemon:
        config = config_of(daemon.address, "whole", "nvme")
        return run_to_the_end(Plan(directory=str(directory), steps=STEPS, config=config))


@pytest.mark.parametrize(
    ("kill", "device"),
    [(kill_one_trainer, "nvme"), (kill_all_trainers, "cpu"), (kill_everything, "cpu")],
)
def test_a_run_killed_in_mid_step_ends_with_the_bits_of_the_uninterrupted_one(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor], kill: Callable[[Launch, Plan], None], device: str
) -> None:
    plan = make_plan(tmp_path, device)
    with launched(plan) as launch:
        wait_for_step(launch, plan, KILLED_AT)
        kill(launch, plan)
        # No survivor hangs: each one notices the kill and ends with an error.
        assert all(launch.wait(END_SECONDS)), launch.output()

    weights = run_to_the_end(plan)

    first, second = map(int, plan.starts_file.read_text().split())
    assert first == 0
    # The step in which the kill came is committed as a whole or not at all. No earlier step is lost.
    assert second in (KILLED_AT - 1, KILLED_AT)
    assert weights.keys() == uninterrupted.keys()
    assert [name for name in weights if not torch.equal(weights[name], uninterrupted[name])] == []


def test_a_run_whose_own_daemon_is_killed_in_mid_step_goes_on(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    plan = make_plan(tmp_path, "nvme")
    with launched(plan) as launch:
        for step in (KILLED_AT, KILLED_AT + 3):
            wait_for_step(launch, plan, step)
            kill_daemon(launch, plan)
        assert launch.wait(END_SECONDS) == [0] * WORLD_SIZE, launch.output()

    assert plan.starts_file.read_text().split() == ["0"], "no rank is started anew"
    weights: dict[str, torch.Tensor] = torch.load(plan.weights_file)
    assert [name for name in weights if not torch.equal(weights[name], uninterrupted[name])] == []
