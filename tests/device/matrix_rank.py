"""One rank of a launch of the device's matrix: `python -m tests.device.matrix_rank PLAN.json`, as torchrun starts it.

It makes the runs of the plan one after the other. Rank 0 writes a line of JSON for each of them when it has ended, so
that what was found is kept if the process ends in a later one.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from paramserver.contract.optimizers.optimizer import count
from tests.device import lag
from tests.device.training_on_lanes import Lateness, train
from tests.integration.support import training
from tests.integration.support.training import Result, Run
from trainer_client.base.lanes.device_lanes import DeviceLanes
from trainer_client.training.step.training_step import TrainingStep

# The time in which a closed engine gives back what it held, on a busy machine.
SETTLE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of a plan.

    Attributes:
        name: what the report calls it.
        run: the fields of the Run.
        lateness: the fields of the Lateness.
        compares: whether the run is made without the store on the CPU, too; with one rank only.
        dies_at: the call of Lanes.poll in which rank `victim` kills itself; 0: in none.
    """

    name: str
    run: dict[str, Any]
    lateness: dict[str, Any] = field(default_factory=dict)
    compares: bool = False
    dies_at: int = 0
    victim: int = 0
    # See training_on_lanes.train. The guarded arena knows nothing of a daemon that is started again.
    guarded: bool = True


def digest(result: Result) -> str:
    """Return a digest of all bits of a result."""
    sums = hashlib.sha256(json.dumps([result.losses, result.norms, result.skipped]).encode())
    for tensors in (result.weights, result.moments):
        for name in sorted(tensors):
            sums.update(name.encode())
            sums.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()[:16]


def distance(one: Result, other: Result) -> float:
    """Return the norm of the difference of two results' weights, as a part of the weights' norm."""
    ours, theirs = (torch.cat([r.weights[n].float().flatten() for n in sorted(r.weights)]) for r in (one, other))
    return float(torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs))


@contextmanager
def counted_polls(task: Task) -> Iterator[list[int]]:
    """Count the calls of Lanes.poll in the list's only element, and kill this rank in the chosen one."""
    polls, poll = [0], DeviceLanes.poll
    dies_at = task.dies_at if task.victim == (dist.get_rank() if dist.is_initialized() else 0) else 0

    def count_poll(lanes: DeviceLanes) -> None:
        polls[0] += 1
        if polls[0] == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        poll(lanes)

    with mock.patch.object(DeviceLanes, "poll", count_poll):
        yield polls


@contextmanager
def counted_segments() -> Iterator[list[int]]:
    """Add to the list, after each step, how often the device has allocated memory since the begin of the context."""
    before, segments, make_step = lag.memory_counters().segments, list[int](), TrainingStep.make

    def make_and_count(step: TrainingStep, number: int) -> bool:
        is_made = make_step(step, number)
        segments.append(lag.memory_counters().segments - before)
        return is_made

    with mock.patch.object(TrainingStep, "make", make_and_count):
        yield segments


def held_bytes() -> tuple[int, int]:
    """Return how much memory of the host is registered, and how much of the device is allocated.

    The device keeps no free memory for the next run, so that what that one allocates can be counted.
    """
    gc.collect()
    # The optimizers keep the last few numbers of updates.
    count.cache_clear()
    lag.reset()
    torch.accelerator.empty_cache()
    return lag.registered_bytes(), lag.memory_counters().allocated_bytes


def left_bytes(before: tuple[int, int]) -> list[int]:
    """Return how much more is held than `before`, when threads of the closed session have had time to end."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left = [now - former for now, former in zip(held_bytes(), before, strict=True)]
        if max(left) <= 0 or time.monotonic() > deadline:
            return [max(0, more) for more in left]
        time.sleep(0.05)


def make(task: Task) -> dict[str, Any]:
    """Make one run, and return the line of the report."""
    held_bytes()
    began = time.monotonic()
    run = Run(**task.run)
    with counted_polls(task) as polls, counted_segments() as segments:
        result = train(run, Lateness(**task.lateness), guarded=task.guarded)
    line = {
        "name": task.name,
        "digest": digest(result),
        "end_digest": digest(replace(result, losses=[], norms=[], skipped=0)),
        "races": [str(race) for race in lag.races()],
        "outstanding": lag.most_outstanding(),
        "resumed_step": result.resumed_step,
        "skipped": result.skipped,
        "polls": polls[0],
        "segments": segments,
        "seconds": round(time.monotonic() - began, 2),
    }
    lag.clear_races()
    if task.compares:
        # The device has no fused attention, so the CPU takes the same path.
        with sdpa_kernel(SDPBackend.MATH):
            plain = training.train(replace(run, through_store=False))
        line |= {"equals_cpu": digest(plain) == line["digest"], "distance_to_cpu": distance(result, plain)}
    return line


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    lag.load()
    is_alone = int(os.environ["WORLD_SIZE"]) == 1
    if not is_alone:
        dist.init_process_group("cpu:gloo,lag:lag")
        # The third of three ranks shares a device with the first.
        os.environ["LOCAL_RANK"] = str(dist.get_rank() % torch.accelerator.device_count())
    writes = is_alone or dist.get_rank() == 0
    before = held_bytes()
    with Path(plan["lines"]).open("a", buffering=1) if writes else nullcontext() as lines:
        for fields in plan["tasks"]:
            line = make(Task(**fields))
            # It takes a second or two, so it is measured once, for all runs of the process.
            line["left_bytes"] = left_bytes(before) if fields is plan["tasks"][-1] else [0, 0]
            if lines is not None:
                lines.write(json.dumps(line) + "\n")
    if not is_alone:
        dist.destroy_process_group()


def tasks_as_json(tasks: list[Task], lines: Path) -> str:
    """Return the plan of a launch, whose rank 0 adds to the file `lines`."""
    return json.dumps({"lines": str(lines), "tasks": [asdict(task) for task in tasks]})


if __name__ == "__main__":
    main()
