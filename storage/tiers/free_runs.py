"""Free space in one dimension: sorted, disjoint runs that never touch. Arena and data file both keep theirs so.

Owns no lock: who shares it between threads has one.
"""

from __future__ import annotations

import bisect
from array import array

import numpy as np
from numpy.typing import NDArray


class FreeRuns:
    """Runs `[start, end)`, by start; joined as soon as they touch."""

    def __init__(self) -> None:
        # Packed, so that numpy can look through all lengths in one pass: there may be ten thousands of runs.
        self._starts = array("q")
        self._lengths = array("q")
        self.free_bytes = 0

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Start and end of a run."""
        return self._starts[index], self._starts[index] + self._lengths[index]

    def whole_units(self, unit: int) -> int:
        """How many pieces of length `unit` the runs hold."""
        return int((np.asarray(self._lengths) // unit).sum())

    def lowest_fit(self, length: int) -> int | None:
        """Index of the first run that holds `length`; None where none does."""
        fitting = self._fitting(length)
        return int(fitting[0]) if len(fitting) else None

    def highest_fit(self, length: int) -> int | None:
        """Index of the last run that holds `length`; None where none does."""
        fitting = self._fitting(length)
        return int(fitting[-1]) if len(fitting) else None

    def shortest_fit(self, length: int) -> int | None:
        """Index of the shortest run that holds `length`, of those alike the first; None where none does."""
        fitting = self._fitting(length)
        return int(fitting[np.asarray(self._lengths)[fitting].argmin()]) if len(fitting) else None

    def longest(self) -> int | None:
        """Index of the longest run, of those alike the first; None where there is no run."""
        return int(np.asarray(self._lengths).argmax()) if self._lengths else None

    def add(self, start: int, end: int) -> None:
        """Makes `[start, end)` free; joins it with its neighbours."""
        self.free_bytes += end - start
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i > 0 and self._starts[i - 1] + self._lengths[i - 1] == start:
            self._lengths[i - 1] += end - start
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, end - start)

    def cut(self, index: int, length: int, *, from_top: bool = False) -> int:
        """Takes `length` from the lower or upper edge of a run; where it starts."""
        start, end = self[index]
        self.free_bytes -= length
        if end - start == length:
            del self._starts[index], self._lengths[index]
        else:
            self._lengths[index] -= length
            if not from_top:
                self._starts[index] += length
        return end - length if from_top else start

    def _fitting(self, length: int) -> NDArray[np.intp]:
        return np.flatnonzero(np.asarray(self._lengths) >= length)
