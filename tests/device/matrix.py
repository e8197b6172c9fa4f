"""The engine's matrix on the simulated device: each cell has the same bits, however late the device's streams are.

`python -m tests.device.matrix --seeds 5` (`make device-matrix SEEDS=5`) makes these runs:

- each cell (training, stage, placement) on one and on two ranks: without lag, with all streams 3 ms late, with one of
  the streams 300 ms late, and with random lags of each seed; on three ranks without lag and with one seed;
- with one rank, each training in plain PyTorch on the CPU, too, whose bits must be the same;
- chains of runs that are killed at a random moment and resumed, and of runs that go on with another number of ranks.

Prints a report in JSON. The exit status is 1 if any bit differs, if the device has seen a race, or if a run failed. A
cell that fails is repeated with `--cell NAME`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.device import matrix_chains, native_build
from tests.device.matrix_cells import PROMPT, cells, latenesses, training_of
from tests.device.matrix_rank import Task, tasks_as_json
from tests.device.training_on_lanes import Lateness
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import Launch

MODULE = "tests.device.matrix_rank"
DAEMON = {
    "host_budget": "256MiB",
    "nvme_budget": "8GiB",
    # The store frees soon what a killed rank held.
    "session_grace_seconds": 1.0,
    "late_copy_seconds": 0.5,
}
# A launch makes the runs of so many cells on one daemon; each run leaves a job on it.
CELLS_OF_LAUNCH = 6
# The time that one run may take on a busy machine.
RUN_SECONDS = 120.0

Line = dict[str, Any]


class Report:
    """What the runs have shown."""

    def __init__(self) -> None:
        self.runs: dict[str, int] = {}
        self.problems: list[str] = []
        self.most_outstanding = 0
        self.digests: dict[tuple[int, str], dict[str, str]] = {}
        # By training: whether it has the bits of plain PyTorch on the CPU.
        self.cpu: dict[str, bool] = {}
        self.seconds = 0.0

    def add(self, kind: str, line: Line) -> None:
        """Count a run of a kind, such as "2 ranks", and note its races."""
        self.runs[kind] = self.runs.get(kind, 0) + 1
        self.most_outstanding = max(self.most_outstanding, line["outstanding"])
        self.seconds += line["seconds"]
        self.problems += [f"{kind}: {line['name']}: {race}" for race in line["races"]]
        if any(line["left_bytes"]):
            self.problems.append(f"{kind}: {line['name']}: registered and device bytes were left: {line['left_bytes']}")

    def add_cell(self, world_size: int, cell: str, lines: Mapping[str, Line]) -> None:
        """Compare the runs of a cell, by schedule, with the one without lag."""
        kind = f"{world_size} rank{'s' * (world_size > 1)}"
        for line in lines.values():
            self.add(kind, line)
        prompt = lines.get("prompt")
        if prompt is None:
            return
        self.problems += [
            f"{kind}: {cell}: other bits under {schedule!r}"
            for schedule, line in lines.items()
            if line["digest"] != prompt["digest"]
        ]
        self.digests.setdefault((world_size, training_of(cell)), {})[cell] = prompt["digest"]
        if "equals_cpu" in prompt:
            self.cpu[training_of(cell)] = prompt["equals_cpu"]
            if not prompt["equals_cpu"]:
                far = prompt["distance_to_cpu"]
                self.problems.append(f"{kind}: {cell}: other bits than plain PyTorch on the CPU, {far:.1e} away")

    def conclude(self) -> dict[str, Any]:
        """Compare the places with each other, and return the report."""
        for (world_size, training), found in self.digests.items():
            if len(set(found.values())) > 1:
                self.problems.append(f"{world_size} ranks: {training}: the places have other bits: {found}")
        return {
            "cells": sum(map(len, self.digests.values())),
            "runs": self.runs,
            "seconds_of_runs": round(self.seconds),
            "most_tasks_outstanding_on_a_stream": self.most_outstanding,
            "equal_to_the_cpu": sorted(training for training, equal in self.cpu.items() if equal),
            "problems": self.problems,
        }


@contextmanager
def store(directory: Path) -> Iterator[Daemon]:
    with Daemon(directory / "state", DAEMON) as daemon:
        yield daemon


def run_tasks(tasks: Sequence[Task], world_size: int, directory: Path) -> tuple[list[Line], list[str]]:
    """Make the runs in one launch, and return their lines; after a failure go on behind the run that failed.

    Returns:
        The lines of the runs that ended, and a description of each failure.
    """
    lines_file, failures, left = directory / "lines.jsonl", list[str](), list(tasks)
    found: list[Line] = []
    while left:
        lines_file.unlink(missing_ok=True)
        plan = directory / "plan.json"
        plan.write_text(tasks_as_json(left, lines_file))
        with Launch(MODULE, world_size, (plan,), directory) as launch:
            try:
                codes = launch.wait(RUN_SECONDS * len(left))
            except AssertionError:
                codes = []
            output = launch.output()
        lines = [json.loads(line) for line in lines_file.read_text().splitlines()] if lines_file.exists() else []
        found += lines
        left = left[len(lines) :]
        if codes != [0] * world_size:
            name = left[0].name if left else "the end of the launch"
            failures.append(f"{world_size} ranks: {name}: exit codes {codes}\n{output[-4000:]}")
            left = left[1:]
    return found, failures


def play_cells(
    names: Sequence[str], world_size: int, seeds: int, directory: Path, address: str, report: Report, *, brief: bool
) -> None:
    """Make all runs of some cells in one launch.

    Args:
        brief: only without lag, and with one seed.
    """
    every = list(cells())
    tasks: list[Task] = []
    for name in names:
        schedules = dict(latenesses(seeds, every.index(name), world_size))
        if brief:
            schedules = {"prompt": PROMPT, "random 1": Lateness(random_ms=20, seed=1)}
        for schedule, lateness in schedules.items():
            title = f"{name} @ {schedule}"
            run = cells()[name](address, f"{world_size} {title}", world_size)
            compares = world_size == 1 and schedule == "prompt" and training_of(name) not in report.cpu
            tasks.append(Task(name=title, run=asdict(run), lateness=asdict(lateness), compares=compares))
            if compares:
                report.cpu[training_of(name)] = False
    lines, failures = run_tasks(tasks, world_size, directory)
    report.problems += failures
    for name in names:
        of_cell = {line["name"].partition(" @ ")[2]: line for line in lines if line["name"].startswith(f"{name} @ ")}
        report.add_cell(world_size, name, of_cell)


def play(names: Sequence[str], ranks: Sequence[int], seeds: int, directory: Path, seconds: float) -> Report:
    """Make the runs of the cells `names` on each number of ranks of `ranks`.

    Args:
        seconds: no launch begins later than this; the report says which were left out.
    """
    report, began, number = Report(), time.monotonic(), 0
    batches = [(w, names[i : i + CELLS_OF_LAUNCH]) for w in ranks for i in range(0, len(names), CELLS_OF_LAUNCH)]
    # The numbers of ranks take turns, so that a run that is cut short has made a part of each.
    batches.sort(key=lambda batch: (names.index(batch[1][0]), batch[0]))
    for number, (world_size, batch) in enumerate(batches):
        if time.monotonic() - began > seconds:
            left = sum(len(cells_left) for _, cells_left in batches[number:])
            report.problems.append(f"{left} cells were left out, because the time was up")
            break
        place = directory / str(number)
        place.mkdir(parents=True)
        with store(place) as daemon:
            play_cells(batch, world_size, seeds, place, daemon.address, report, brief=world_size > 2)
        print(
            f"{number + 1}/{len(batches)}: {report.runs}, {len(report.problems)} problems", file=sys.stderr, flush=True
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.device.matrix", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many schedules with random lags each cell has")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3], help="without a number: only the chains")
    parser.add_argument("--cell", action="append", help="only this cell; repeatable")
    parser.add_argument("--chains", type=int, default=3, help="how many times each chain is killed; 0: no chains")
    parser.add_argument("--seed", type=int, default=None, help="of the moments of kills; a random one by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no launch of cells after this time")
    args = parser.parse_args()
    native_build.library()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="device-matrix-") as temporary:
        chains: Mapping[str, dict[str, Any]] = {}
        if args.chains:
            with store(Path(temporary)) as daemon:
                chains = matrix_chains.play(
                    daemon.address, Path(temporary), args.seeds, args.chains, random.Random(seed)
                )
        # In a random order, a campaign that is cut short has seen a part of everything.
        names = args.cell or random.Random(seed).sample(list(cells()), len(cells()))
        report = play(names, args.ranks, args.seeds, Path(temporary), args.seconds)
    found = {"seed": seed, "seeds": args.seeds, "seconds": round(time.monotonic() - began)} | report.conclude()
    problems = found["problems"] + [problem for chain in chains.values() for problem in chain["problems"]]
    print(json.dumps(found | {"chains": chains}, indent=2))
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
