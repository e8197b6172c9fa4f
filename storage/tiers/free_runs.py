"""Free space in one dimension: sorted, disjoint runs. The arena and the data files use it.

This module owns no lock: a caller that shares the runs between threads must have one.
"""

from __future__ import annotations

import bisect
from array import array

import numpy as np
from numpy.typing import NDArray


class FreeRuns:
    """Free runs `[start, end)`, ordered by start. Runs that touch are joined, except at multiples of `barrier`.

    So an allocation from one run never crosses a multiple of `barrier`.
    """

    def __init__(self, barrier: int | None = None) -> None:
        self._barrier = barrier
        # The starts and lengths of the free runs are in packed arrays, so that numpy searches all lengths in one pass:
        # there may be tens of thousands of runs.
        self._starts = array("q")
        self._lengths = array("q")
        self.free_bytes = 0

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the start and the end of a run."""
        return self._starts[index], self._starts[index] + self._lengths[index]

    def whole_units(self, unit: int) -> int:
        """Return the number of pieces of length `unit` that fit into the runs."""
        return int((np.asarray(self._lengths) // unit).sum())

    def lowest_fit(self, length: int) -> int | None:
        """Return the index of the first run that holds `length`; None if none does."""
        fitting = self._fitting(length)
        return int(fitting[0]) if len(fitting) else None

    def highest_fit(self, length: int) -> int | None:
        """Return the index of the last run that holds `length`; None if none does."""
        fitting = self._fitting(length)
        return int(fitting[-1]) if len(fitting) else None

    def shortest_fit(self, length: int) -> int | None:
        """Return the index of the shortest run that holds `length`, the first of equal ones; None if none does."""
        fitting = self._fitting(length)
        return int(fitting[np.asarray(self._lengths)[fitting].argmin()]) if len(fitting) else None

    def longest(self) -> int | None:
        """Return the index of the longest run, the first of equal ones; None if there is no run."""
        return int(np.asarray(self._lengths).argmax()) if self._lengths else None

    def add(self, start: int, end: int) -> None:
        """Make `[start, end)` free, and join it with its neighbours."""
        self.free_bytes += end - start
        if self._barrier is not None:
            while (barrier := (start // self._barrier + 1) * self._barrier) < end:
                self._join(start, barrier)
                start = barrier
        self._join(start, end)

    def take_across(self, length: int) -> int | None:
        """Take `length` from runs that touch at barriers, and return the start of what is taken.

        The lowest such runs are taken; the result is None if there are none. Call this only for a `length` above
        `barrier`, because no single run is so long.
        """
        first = start = end = 0
        for i in range(len(self)):
            begin, run_end = self[i]
            if begin != end or not i:
                first, start = i, begin
            end = run_end
            if end - start >= length:
                self.free_bytes -= end - start
                del self._starts[first : i + 1], self._lengths[first : i + 1]
                if end - start > length:
                    self.add(start + length, end)
                return start
        return None

    def _join(self, start: int, end: int) -> None:
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end and not self._is_barrier(end):
            end += self._lengths[i]
            del self._starts[i], self._lengths[i]
        if i > 0 and self._starts[i - 1] + self._lengths[i - 1] == start and not self._is_barrier(start):
            self._lengths[i - 1] += end - start
        else:
            self._starts.insert(i, start)
            self._lengths.insert(i, end - start)

    def cut(self, index: int, length: int, *, from_top: bool = False) -> int:
        """Take `length` from the lower or the upper end of a run, and return the start of the part taken."""
        start, end = self[index]
        self.free_bytes -= length
        if end - start == length:
            del self._starts[index], self._lengths[index]
        else:
            self._lengths[index] -= length
            if not from_top:
                self._starts[index] += length
        return end - length if from_top else start

    def _is_barrier(self, place: int) -> bool:
        return self._barrier is not None and place % self._barrier == 0

    def _fitting(self, length: int) -> NDArray[np.intp]:
        return np.flatnonzero(np.asarray(self._lengths) >= length)
