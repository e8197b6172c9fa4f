"""The heap of a rank on the CPU: the memory of a step's tensors that malloc keeps after they are freed.

glibc takes blocks of up to 32 MiB from its heap, where a freed block leaves a hole that stays resident until a block
that fits is put there. So the process holds more than its live tensors. This module is a model of that heap: a block
goes into the smallest hole that has room. Neighbouring holes are not joined, because small objects of other code lie
between them. The top of the heap goes back to the kernel once more than 64 MiB are free there (M_TRIM_THRESHOLD at its
largest, man 3 mallopt). For two measured jobs, a model that joins neighbouring holes gave a fifth to a third less
memory than the jobs held.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable

MAPPED_BYTES = 32 << 20
_TRIM_BYTES = 64 << 20
_ALIGNMENT = 64


class Heap:
    """A model of malloc that counts the resident memory while blocks are allocated and freed.

    Attributes:
        peak: the most resident bytes so far.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._mapped = 0
        self._top = 0
        self._resident = 0
        # For each block that was allocated, its first byte in the modelled heap and its size. A block of MAPPED_BYTES
        # or more is not in the heap, because malloc maps separate pages for it. Such a block has -1 in place of the
        # first byte.
        self._blocks: dict[Hashable, tuple[int, int]] = {}
        # The size and the first byte of each hole (a free range between blocks), in order of the sizes.
        self._holes: list[tuple[int, int]] = []

    def allocate(self, name: Hashable, nbytes: int) -> None:
        """Put a block into the smallest hole that has room, or at the top. Large blocks get memory of their own."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        if size >= MAPPED_BYTES:
            self._blocks[name] = (-1, size)
            self._mapped += size
        else:
            self._blocks[name] = (self._place(size), size)
        self.peak = max(self.peak, self._mapped + self._resident)

    def free(self, name: Hashable) -> None:
        """Free the block called `name`. Its memory stays resident as a hole, unless it goes back to the kernel."""
        start, size = self._blocks.pop(name)
        if start < 0:
            self._mapped -= size
        elif start + size == self._top:
            self._top = start
            if self._resident - self._top > _TRIM_BYTES:
                self._resident = self._top
        else:
            bisect.insort(self._holes, (size, start))

    def _place(self, size: int) -> int:
        index = bisect.bisect_left(self._holes, (size, 0))
        if index == len(self._holes):
            start, self._top = self._top, self._top + size
            self._resident = max(self._resident, self._top)
            return start
        hole, start = self._holes.pop(index)
        if hole > size:
            bisect.insort(self._holes, (hole - size, start + size))
        return start
