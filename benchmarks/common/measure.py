"""Timed runs, and comparisons of two sides that take turns, so that other load on the machine slows both alike.

A *case* compares fio with this project ("ours"): both sides move the same bytes in turns. The first pair of runs is a
warm-up. The result of a case is the median of the ratios of the other pairs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

GB = 1e9

# A function that shows its argument, a line of text that says what is being measured.
Progress = Callable[[str], None]


def prefixed(progress: Progress, label: str) -> Progress:
    """Return a function that shows its argument after a label, as in "nvme: round 1 of 3"."""
    return lambda what: progress(f"{label}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """The numbers of I/O threads of the store and of fio, each of which makes one request at a time.

    The defaults are those of the engine.
    """

    read: int = 4
    write: int = 2


class BenchmarkError(Exception):
    """The benchmark cannot be run, or a result is wrong, for example the bytes that were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run, which moved `nbytes` in `seconds` and used `cpu_seconds` of CPU time in all threads."""

    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """The speed in GB/s."""
        return self.nbytes / GB / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison. `fio` and `ours` each make one run; `ours` gets the number of the round, from 0.

    `fio` is None if fio is not installed.
    """

    name: str
    fio: Callable[[], Sample] | None
    ours: Callable[[int], Awaitable[Sample]]


@dataclass(slots=True)
class CpuStopwatch:
    """A context that measures wall-clock time and the CPU time of this process."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __enter__(self) -> CpuStopwatch:
        self.cpu_seconds = -time.process_time()
        self.seconds = -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()
        self.cpu_seconds += time.process_time()

    def sample(self, nbytes: int) -> Sample:
        """Return the measured block as a sample that moved `nbytes`."""
        return Sample(nbytes=nbytes, seconds=self.seconds, cpu_seconds=self.cpu_seconds)


async def compete(cases: Sequence[Case], rounds: int, progress: Progress) -> dict[str, dict[str, Any]]:
    """Run the cases in order, `rounds` times after a warm-up, and return the `report` of each case by its name.

    The side that goes first changes from round to round, because a device may still be busy with the writes of the side
    before.
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
    """Return the `summary` of both sides, and the ratios ours / fio with their median; None without samples of fio."""
    ratios = [own.rate / other.rate for own, other in zip(ours, theirs, strict=True)] if theirs else []
    return {
        "fio": summary(theirs) if theirs else None,
        "ours": summary(ours),
        "ratio": round(statistics.median(ratios), 4) if ratios else None,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that has the median of the values' distribution with a probability of at least 95 %.

    With the n values in order, x(1) to x(n), it goes from x(k) to x(n + 1 - k). The median lies outside if fewer than k
    values are on one side of it. So its probability is 1 - 2 P(B < k), where B is binomial with n draws at 1/2. The
    largest k is taken with which that is 0.95 or more: of 12 values the third and the tenth. This needs no assumption
    about the distribution but that it is continuous (H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition,
    2003, section 7.1).

    Returns:
        The two values; None for fewer than six, because from the least to the most of five it is 94 % only.
    """
    count, ordered = len(values), sorted(values)
    places = [k for k in range(1, count) if sum(math.comb(count, b) for b in range(k)) / 2**count <= 0.025]
    return (ordered[places[-1] - 1], ordered[-places[-1]]) if places else None


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return all samples of one side, and their medians."""
    return {
        "bytes": [sample.nbytes for sample in samples],
        "seconds": [round(sample.seconds, 6) for sample in samples],
        "gb_per_second": [round(sample.rate, 4) for sample in samples],
        "median_gb_per_second": round(statistics.median(sample.rate for sample in samples), 4),
        "cpu_seconds_per_gb": round(statistics.median(s.cpu_seconds / (s.nbytes / GB) for s in samples), 4),
    }
