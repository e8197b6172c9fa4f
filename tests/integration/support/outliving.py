"""Training runs whose daemon is killed and started again while they run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.integration.support.daemon import Daemon
from tests.integration.support.outliving_run import Plan
from tests.integration.support.ranks import END_SECONDS, Launch

DAEMON = {"host_budget": "64MiB", "nvme_budget": "512MiB"}
MODULE = "tests.integration.support.outliving_run"


def make_plan(directory: Path, config: Mapping[str, Any], **fields: Any) -> Plan:
    """Return the plan of a run in `directory`, with a daemon whose state directory is `directory`/state."""
    directory.mkdir(parents=True, exist_ok=True)
    state = directory / "state"
    section = {"address": f"unix:{state / 'paramserver.sock'}"} | dict(config.get("paramserver", {}))
    return Plan(
        directory=str(directory),
        lock_file=str(state / "lock"),
        config={"train_micro_batch_size_per_gpu": 2, **config, "paramserver": section},
        **fields,
    )


@contextmanager
def launched(plan: Plan, world_size: int) -> Iterator[Launch]:
    """Start the ranks of a run, and yield their launch."""
    directory = Path(plan.directory)
    plan_file = directory / "plan.json"
    plan_file.write_text(json.dumps(asdict(plan)))
    with Launch(MODULE, world_size, (plan_file,), directory) as launch:
        yield launch


def start_daemon(plan: Plan) -> Daemon:
    return Daemon(Path(plan.lock_file).parent, DAEMON | plan.daemon)


def outlive(
    plan: Plan, world_size: int, beside: Callable[[Daemon, Launch], None] = lambda *_: None
) -> list[dict[str, Any]]:
    """Run a plan with a daemon that is started again whenever it ends, and return the results of each rank.

    Args:
        plan: the run.
        world_size: the number of ranks.
        beside: a function that is called repeatedly with the present daemon while the ranks run. It may kill that one.
    """
    daemon = start_daemon(plan)
    try:
        with launched(plan, world_size) as launch:
            deadline = time.monotonic() + END_SECONDS
            while not all(rank.poll() is not None for rank in launch.ranks):
                assert time.monotonic() < deadline, launch.output()
                if any(rank.poll() for rank in launch.ranks):
                    break
                if daemon.process.poll() is not None:
                    daemon = start_daemon(plan)
                beside(daemon, launch)
                time.sleep(0.005)
            codes = launch.wait(END_SECONDS)
            assert codes == [0] * world_size, launch.output()
    finally:
        daemon.kill()
    return [torch.load(plan.results_file(rank)) for rank in range(world_size)]


def differences(results: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all results in which two runs differ in any bit."""
    found = []
    for rank, (one, other) in enumerate(zip(results, expected, strict=True)):
        found += [f"rank {rank}: {kind}" for kind in ("losses", "evaluations") if one[kind] != other[kind]]
        for kind in ("weights", "moments"):
            assert one[kind].keys() == other[kind].keys()
            found += [
                f"rank {rank}: {kind} of {name}"
                for name, value in one[kind].items()
                if not torch.equal(value, other[kind][name])
            ]
    return found
