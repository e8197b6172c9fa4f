"""Training runs whose daemon is killed and started again while they run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.integration.support.daemon import Daemon
from tests.integration.support.outliving_run import Plan
from tests.integration.support.ranks import END_SECONDS, Launch

DAEMON = {"host_budget": "64MiB", "nvme_budget": "512MiB"}
MODULE = "tests.integration.support.outliving_run"


def make_plan(
    directory: Path, config: Mapping[str, Any], *, name: str = "default", job: str | None = None, **fields: Any
) -> Plan:
    """Return the plan of a run in `directory`, with a daemon whose state directory is `directory`/state.

    The job has the name of the run unless `job` is given.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = directory / "state"
    section = {"address": f"unix:{state / 'paramserver.sock'}", "job": job or name}
    section |= config.get("paramserver", {})
    return Plan(
        directory=str(directory),
        name=name,
        lock_file=str(state / "lock"),
        config={"train_micro_batch_size_per_gpu": 2, **config, "paramserver": section},
        **fields,
    )


def start_daemon(plan: Plan, *, wait: bool = True) -> Daemon:
    return Daemon(Path(plan.lock_file).parent, DAEMON | plan.daemon, namespace=plan.namespace, wait=wait)


def outlive(
    plan: Plan, world_size: int, beside: Callable[[Daemon, Launch], None] = lambda *_: None
) -> list[dict[str, Any]]:
    """Run a plan with a daemon that is started again whenever it ends, and return the results of each rank.

    Args:
        plan: the run.
        world_size: the number of ranks.
        beside: a function that is called repeatedly with the present daemon while the ranks run. It may kill that one.
    """
    return outlive_all([plan], world_size, beside)[plan.name]


def outlive_all(
    plans: Sequence[Plan], world_size: int, beside: Callable[[Daemon, Launch], None] = lambda *_: None
) -> dict[str, list[dict[str, Any]]]:
    """Run plans one after the other in one launch, and return the results of each rank by the name of the run.

    All plans are of one directory, so the runs have one daemon. It is started again whenever it ends, as in `outlive`.
    """
    directory = Path(plans[0].directory)
    plan_file = directory / "plans.json"
    plan_file.write_text(json.dumps([asdict(plan) for plan in plans]))
    daemon = start_daemon(plans[0])
    try:
        with Launch(MODULE, world_size, (plan_file,), directory) as launch:
            deadline = time.monotonic() + END_SECONDS
            while not all(rank.poll() is not None for rank in launch.ranks):
                assert time.monotonic() < deadline, launch.output() + daemon.log
                if any(rank.poll() for rank in launch.ranks):
                    break
                if daemon.process.poll() is not None:
                    # A rank may kill this daemon as soon as it serves, and so before a wait for it has ended.
                    daemon = start_daemon(plans[0], wait=False)
                beside(daemon, launch)
                time.sleep(0.005)
            codes = launch.wait(END_SECONDS)
            assert codes == [0] * world_size, launch.output()
    finally:
        daemon.kill()
    return {plan.name: [torch.load(plan.results_file(rank)) for rank in range(world_size)] for plan in plans}


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
