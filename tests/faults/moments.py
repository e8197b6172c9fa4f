"""Random moments of a training run, at which a campaign strikes: one in each of some chosen steps.

Every other moment is at a random time of its step. The others are while a rank hands gradients over or commits, because
in small models that takes so little time that random moments would miss it.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from tests.integration.support.outliving_run import Plan

_COMMITTING = ("step", "after step")


class Moments:
    """The moments of one run.

    Attributes:
        struck: the step and the moment of each rank, for each moment that has come.
    """

    def __init__(self, plan: Plan, ranks: int, steps: Sequence[int], rng: random.Random) -> None:
        self.struck: list[list[str]] = []
        self._files = [plan.progress_file(rank) for rank in range(ranks)]
        self._steps = list(steps)
        self._rng = rng
        self._seen: dict[int, float] = {}
        self._due: float | None = None

    def has_come(self) -> bool:
        """Read the progress of the ranks, and return whether it is time to strike. Call this every few milliseconds."""
        places = [self._place(file) for file in self._files]
        step = min(step for step, _ in places)
        now = time.monotonic()
        self._seen.setdefault(step, now)
        there = bool(self._steps) and step >= self._steps[0]
        commits = any(moment in _COMMITTING for _, moment in places)
        if there and self._due is None and len(self.struck) % 2 and commits:
            self._due = now
        elif there and self._due is None and len(self.struck) % 2 == 0:
            # The median of all steps' durations is that of a step without a strike.
            times = sorted(self._seen.values())
            durations = [later - earlier for earlier, later in itertools.pairwise(times)]
            self._due = now + self._rng.uniform(0.0, statistics.median(durations) if durations else 0.1)
        if self._due is None or now < self._due:
            return False
        self.struck.append([f"step {step}: {moment}" for step, moment in places])
        self._steps.pop(0)
        self._due = None
        return True

    @staticmethod
    def _place(file: Path) -> tuple[int, str]:
        """Return the step and the moment that a rank has reached."""
        lines = file.read_text().splitlines() if file.exists() else []
        step, _, moment = lines[-1].partition(" ") if lines else ("0", "", "starting")
        return int(step), moment


def spread(count: int, steps_apart: int, rng: random.Random) -> list[int]:
    """Return the numbers of `count` steps, none of them neighbours, so that the run goes on between two strikes."""
    return [1 + steps_apart * index + rng.randrange(steps_apart - 1) for index in range(count)]
