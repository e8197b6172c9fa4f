"""Timed runs, and contests of two that take turns, so that what the neighbours do falls on both.

A *case* is a pair of runs that move the same bytes, fio's and ours. The first pair of each case is a warm-up. What
counts is the median of the ratios of the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

GB = 1e9

# Says what is being done.
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Requests under way at once, the same for both sides; by default as many as the engine has."""

    read: int = 4
    write: int = 2


class BenchmarkError(Exception):
    """The benchmark cannot be run, or what it measured is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run: `nbytes` moved in `seconds`, at `cpu_seconds` of all threads."""

    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / GB / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: each callable does one run; ours is given the round's number, from 0. `fio` is None where there
    is no fio."""

    name: str
    fio: Callable[[], Sample] | None
    ours: Callable[[int], Awaitable[Sample]]


@dataclass(slots=True)
class Stopwatch:
    """Wall clock and CPU time of this process, between entry and exit."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __enter__(self) -> Stopwatch:
        self.cpu_seconds = -time.process_time()
        self.seconds = -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        self.cpu_seconds += time.process_time()

    def sample(self, nbytes: int) -> Sample:
        """The run as one that moved `nbytes`."""
        return Sample(nbytes=nbytes, seconds=self.seconds, cpu_seconds=self.cpu_seconds)


async def compete(cases: Sequence[Case], rounds: int, progress: Progress) -> dict[str, dict[str, Any]]:
    """Runs the cases in order, `rounds` times after a warm-up; a report by case (see `report`).

    Who goes first changes from round to round: a device may still be busy with what was written just before.
    """
    theirs: dict[str, list[Sample]] = {case.name: [] for case in cases}
    ours: dict[str, list[Sample]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            progress(f"{case.name}: " + (f"round {number} of {rounds}" if number else "warm-up"))
            fio_first = number % 2 == 0
            if case.fio is not None and fio_first:
                theirs[case.name].append(case.fio())
            ours[case.name].append(await case.ours(number))
            if case.fio is not None and not fio_first:
                theirs[case.name].append(case.fio())
    return {case.name: report(theirs[case.name][1:], ours[case.name][1:]) for case in cases}


def report(theirs: Sequence[Sample], ours: Sequence[Sample]) -> dict[str, Any]:
    """Both sides with all samples, and how fast ours is in units of fio's speed. No samples of fio's: null."""
    ratios = [own.rate / other.rate for own, other in zip(ours, theirs, strict=True)] if theirs else []
    return {
        "fio": summary(theirs) if theirs else None,
        "ours": summary(ours),
        "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """All samples of one side with their medians."""
    return {
        "bytes": [sample.nbytes for sample in samples],
        "seconds": [round(sample.seconds, 6) for sample in samples],
        "gb_per_second": [round(sample.rate, 4) for sample in samples],
        "median_gb_per_second": round(statistics.median(sample.rate for sample in samples), 4),
        "cpu_seconds_per_gb": round(statistics.median(s.cpu_seconds / (s.nbytes / GB) for s in samples), 4),
    }
