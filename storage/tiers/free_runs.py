"""Free space in one dimension: sorted, disjoint runs that never touch. Arena and data file both keep theirs so."""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class FreeRuns:
    """Runs `[start, end)`, by start; joined as soon as they touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.free_bytes = 0

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Start and end of a run."""
        return self._starts[index], self._ends[index]

    def lengths(self) -> Iterator[int]:
        """The runs' lengths, in their order."""
        return (end - start for start, end in zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> None:
        """Makes `[start, end)` free; joins it with its neighbours."""
        self.free_bytes += end - start
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)

    def cut(self, index: int, length: int, *, from_top: bool = False) -> int:
        """Takes `length` from the lower or upper edge of a run; where it starts."""
        start, end = self[index]
        self.free_bytes -= length
        if end - start == length:
            del self._starts[index], self._ends[index]
        elif from_top:
            self._ends[index] = end - length
        else:
            self._starts[index] = start + length
        return end - length if from_top else start
