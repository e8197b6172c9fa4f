"""A hundred kills of trainers or the daemon: the run ends with the bits of a quiet one, and nothing is left behind.

PARAMSERVER_KILLS sets the number of kills; without it there are four. PARAMSERVER_KILL_JOBS sets how many jobs train
at the same time and share the kills, one without it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from tests.gpu.accelerator import NEEDS_ACCELERATOR, kind
from tests.integration.support.crash_run import Plan
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import END_SECONDS, Launch
from tests.integration.support.waiting import wait_until

pytestmark = NEEDS_ACCELERATOR

KILLS = int(os.environ.get("PARAMSERVER_KILLS", "4"))
JOBS = int(os.environ.get("PARAMSERVER_KILL_JOBS", "1"))
# A run makes at least one step before its kill comes, and up to thirty where a step takes 10 ms.
STEPS = 40 * (KILLS // JOBS) + 4
LIMITS = {"host_budget": "128MiB", "nvme_budget": "1GiB", "late_copy_seconds": 0.5}
# A kill comes within this time after a step has begun. Some come in the forward pass, some in the commit.
WITHIN_SECONDS = 0.3
MIB = 1 << 20


@contextmanager
def launched(plan: Plan) -> Iterator[Launch]:
    directory = Path(plan.directory)
    directory.mkdir(exist_ok=True)
    plan_file = directory / "plan.json"
    plan_file.write_text(json.dumps(asdict(plan)))
    with Launch("tests.gpu.ranks", 1, ("crash", plan_file), directory) as launch:
        yield launch


def free_bytes() -> int:
    """Return the free memory of the GPU, as this process sees it; 0 where the device is simulated."""
    return torch.cuda.mem_get_info()[0] if kind() == "cuda" else 0


def step_of(plan: Plan) -> int:
    file = plan.progress_file(0)
    return int(file.read_text().split()[-1]) if file.exists() and file.read_text() else 0


def plan_in(directory: Path, address: str) -> Plan:
    return Plan(directory=str(directory), steps=STEPS, device=kind(), config=config_of(address, "job", "nvme"))


def run_to_the_end(plan: Plan) -> dict[str, torch.Tensor]:
    with launched(plan) as launch:
        assert launch.wait(END_SECONDS) == [0], launch.output()
    weights: dict[str, torch.Tensor] = torch.load(plan.weights_file)
    return weights


def wait_for_the_next_step(launch: Launch, plan: Plan) -> None:
    reached = step_of(plan)
    wait_until(lambda: step_of(plan) > reached or not launch.is_whole, seconds=END_SECONDS)
    assert launch.is_whole, launch.output()


def nothing_is_held(address: str) -> bool:
    host, *_ = tiers(address)
    return host.leased_bytes + host.quarantined_bytes == 0


def kill_in_turns(directory: Path, kills: int, seed: int) -> dict[str, torch.Tensor]:
    """Train through kills of the trainer, of which each fourth one also kills the daemon, and return the weights."""
    rng = random.Random(seed)
    directory.mkdir()
    daemon = Daemon(directory / "state", LIMITS)
    plan = plan_in(directory / "run", daemon.address)
    try:
        for number in range(kills):
            with launched(plan) as launch:
                wait_for_the_next_step(launch, plan)
                time.sleep(rng.uniform(0, WITHIN_SECONDS))
                if number % 4 == 3:
                    daemon.kill()
                    launch.ranks[0].kill()
                    daemon = Daemon(directory / "state", LIMITS)
                else:
                    launch.ranks[0].kill()
                launch.wait(END_SECONDS)
            wait_until(functools.partial(nothing_is_held, daemon.address))
        found = run_to_the_end(plan)
        assert "Traceback" not in daemon.log, daemon.log
    finally:
        daemon.kill()
    return found


def test_kills_cost_no_bit_and_leave_nothing_behind(tmp_path: Path) -> None:
    """The kills are shared between some jobs that train at the same time, because most of the time is a start's."""
    with Daemon(tmp_path / "quiet-state", LIMITS) as daemon:
        expected = run_to_the_end(plan_in(tmp_path / "quiet", daemon.address))
    before = free_bytes()
    with ThreadPoolExecutor(JOBS) as pool:
        jobs = [pool.submit(kill_in_turns, tmp_path / f"job-{job}", KILLS // JOBS, job) for job in range(JOBS)]
        results = [job.result() for job in jobs]
    print(f"{KILLS // JOBS * JOBS} kills of {JOBS} jobs: the GPU has {(before - free_bytes()) / MIB:.0f} MiB less free")
    assert free_bytes() >= before - 64 * MIB, "the memory of killed ranks is back"
    for found in results:
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
