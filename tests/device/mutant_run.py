"""The programs that find mutants, in one process (or rank) that has at most one mutant: see mutants.py.

`python -m tests.device.mutant_run PLAN.json`, with torchrun's environment variables. Rank 0 writes a JSON object to the
plan's file: which program has found the mutant, and by what, or the results of all programs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.device import lag, lanes_cases, mutation
from tests.device.matrix_rank import digest
from tests.device.training_on_lanes import Lateness, train
from tests.integration.support.matrix_cells import run_of
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import Run
from trainer_client.engine import Engine
from trainer_client.model.flat_group import FlatGroup
from trainer_client.step import gradients

# A program that runs for longer hangs, and ends the process. On a busy machine one takes some 10 s.
PROGRAM_SECONDS = 60.0

# Each program runs under these. They matter for mutants that change bits; the device sees races without any lag.
LATE = {"all late": Lateness(all_ms=20), "compute late": Lateness(compute_ms=300)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a process does.

    Attributes:
        site: the number of the mutant among mutation.sites(); None: the right code.
        address: the store.
        job: what the names of jobs begin with.
        expected: the right result of each program; empty: there is none yet.
        result: the file to write to.
    """

    site: int | None
    address: str
    job: str
    expected: dict[str, str] = field(default_factory=dict)
    result: str


def _lanes(late: Lateness, _: str, __: str) -> str:
    """Use lanes as a step of two ranks does, without a store; see lanes_cases.py."""
    lag.reset()
    lag.Schedule(all_ms=late.all_ms, compute_ms=late.compute_ms).use()
    results = lanes_cases.run()
    if results != lanes_cases.expected():
        return f"{results}"
    lanes_cases.run_ends()
    lag.set_lag(0)
    return f"{lanes_cases.measure_early()} early"


def _trained(make: Callable[[str, str], Run], *contexts: Callable[[], Any]) -> Callable[[Lateness, str, str], str]:
    """Return a program that trains, within the contexts."""

    def program(late: Lateness, address: str, job: str) -> str:
        run = make(address, job)
        with _all(contexts):
            return digest(train(run, late))

    return program


@contextmanager
def _all(contexts: tuple[Callable[[], Any], ...]) -> Iterator[None]:
    if not contexts:
        yield
        return
    with contexts[0](), _all(contexts[1:]):
        yield


def _no_room_for_sums() -> Any:
    return mock.patch.object(gradients, "_SHARE_FOR_SUMS", 0.0)


@contextmanager
def _forward_without_memory() -> Iterator[None]:
    """Let the third allocation of a unit fail, and the loop repeat its forward."""
    allocate, forward, calls = FlatGroup.allocate, Engine.forward, [0]

    def allocate_or_fail(group: FlatGroup) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("there is no memory on this device")
        allocate(group)

    def forward_again(engine: Engine, *arguments: Any, **named: Any) -> Any:
        try:
            return forward(engine, *arguments, **named)
        except torch.OutOfMemoryError:
            return forward(engine, *arguments, **named)

    with (
        mock.patch.object(FlatGroup, "allocate", allocate_or_fail),
        mock.patch.object(Engine, "forward", forward_again),
    ):
        yield


@contextmanager
def _states_leaving() -> Iterator[None]:
    """Have all states leave the device for a moment after each micro-batch, with gradients that are being summed."""
    step = Engine.step

    def step_and_leave(engine: Engine) -> None:
        step(engine)
        engine.offload_states()
        engine.reload_states()

    with mock.patch.object(Engine, "step", step_and_leave):
        yield


def _on(tier: str, **fields: Any) -> Callable[[str, str], Run]:
    return lambda address, job: Run(config=config_of(address, job, tier), **{"steps": 2, **fields})


def _at(training: str, place: str, world_size: int) -> Callable[[str, str], Run]:
    return lambda address, job: run_of(training, place, world_size, address, job)


# The programs of one rank and of two, those that find most first.
ALONE = {
    "lanes": _lanes,
    "nvme": _trained(_on("nvme")),
    "sums leave the device": _trained(_on("cpu", accumulation=3, clipping=0.5), _no_room_for_sums),
    "bf16, poisoned step": _trained(_on("nvme", steps=3, precision="bf16", poisoned_step=1)),
    "gradients on the device": _trained(_at("fp32", "zero-1 + optimizer nvme", 1)),
    "fractions": _trained(_at("fp32, each micro-batch", "zero-3 + fractions", 1)),
    "a forward without memory": _trained(_on("nvme"), _forward_without_memory),
    "states on the device": _trained(_at("fp32, each micro-batch", "zero-2", 1)),
}
TOGETHER = {
    "nvme": _trained(_on("nvme", clipping=0.5)),
    "host, accumulation": _trained(_on("cpu", accumulation=2)),
    "replicated states": _trained(_at("fp32, each micro-batch", "zero-1 + optimizer nvme", 2)),
    "fractions": _trained(_at("bf16", "zero-3 + fractions", 2)),
    "states on the device": _trained(_at("fp32, each micro-batch", "ddp", 2)),
    "states leave the device": _trained(_at("fp32, each micro-batch", "zero-1 + optimizer nvme", 2), _states_leaving),
    "sums leave the device": _trained(_on("cpu", accumulation=3, clipping=0.5), _no_room_for_sums),
}


def look(plan: Plan, world_size: int) -> dict[str, Any]:
    """Run the programs until one of them finds something, and return what was found."""
    programs = ALONE if world_size == 1 else TOGETHER
    results: dict[str, str] = {}
    for name, program in programs.items():
        for schedule, late in LATE.items():
            if schedule != "all late" and not plan.expected:
                continue
            faulthandler.dump_traceback_later(PROGRAM_SECONDS, exit=True)
            result = program(late, plan.address, f"{plan.job} {name} {schedule}")
            faulthandler.cancel_dump_traceback_later()
            races = [str(race) for race in lag.races()]
            lag.clear_races()
            if world_size > 1:
                # Each rank has losses of its own, and sees its own races.
                seen: list[tuple[str, list[str]]] = [("", [])] * world_size
                dist.all_gather_object(seen, (result, races))
                result = " ".join(bits for bits, _ in seen)
                races = [race for _, found in seen for race in found]
            by = "race" if races else "bits" if plan.expected and plan.expected[name] != result else None
            if by is not None:
                return {"found_by": name, "schedule": schedule, "as": by, "races": races[:1]}
            results[name] = result
    return {"found_by": None, "results": results}


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    lag.load()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("cpu:gloo,lag:lag")
    if plan.site is not None:
        mutation.apply(mutation.sites()[plan.site])
    found = look(plan, world_size)
    if rank == 0:
        Path(plan.result).write_text(json.dumps(found))
    # A mutant may have broken what the process does at its end, so it ends at once.
    os._exit(0)


if __name__ == "__main__":
    main()
