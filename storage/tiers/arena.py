"""The arena: one region of shared memory behind the host tier, and the exact-size, page-aligned allocator over it.

Owns the memory and the free list. Knows nothing of what the ranges hold. Every range carries a generation number that
no other range ever had, so that a late reference to a reused range can be told from a good one.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
import secrets
from dataclasses import dataclass

from storage import syscalls
from storage.tiers.base import PAGE_BYTES, round_up

NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class ArenaRange:
    """`nbytes` (whole pages) at byte `offset` of the arena."""

    offset: int
    nbytes: int
    generation: int


class Arena:
    """Shared memory, fully allocated at construction; the first page holds the nonce that proves locality."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.fd = syscalls.create_shared_memory("paramserver-arena", self.size_bytes)
        self._map = mmap.mmap(self.fd, self.size_bytes)
        self._view = memoryview(self._map)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._view[:NONCE_BYTES] = self.nonce
        self._generations = itertools.count(1)
        # Free runs by offset: two parallel sorted lists, never empty runs, never two that touch.
        self._starts = [PAGE_BYTES]
        self._ends = [self.size_bytes]
        self.used_bytes = PAGE_BYTES

    @property
    def largest_free_bytes(self) -> int:
        """The longest range that can be allocated now."""
        return max((end - start for start, end in zip(self._starts, self._ends, strict=True)), default=0)

    def allocate(self, nbytes: int, *, from_top: bool = False) -> ArenaRange | None:
        """Takes whole pages for `nbytes`, lowest or highest (`from_top`) first; None where no run is long enough.

        What lives for a step (gradients) comes from the top and what comes and goes from the bottom, so that the two do
        not fragment each other.
        """
        need = round_up(nbytes)
        indexes = range(len(self._starts))
        for i in reversed(indexes) if from_top else indexes:
            start, end = self._starts[i], self._ends[i]
            if end - start < need:
                continue
            offset = end - need if from_top else start
            self._shrink(i, offset, offset + need)
            self.used_bytes += need
            return ArenaRange(offset, need, next(self._generations))
        return None

    def free(self, range_: ArenaRange) -> None:
        """Gives a range back, joining it with its free neighbours."""
        start, end = range_.offset, range_.offset + range_.nbytes
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
        self.used_bytes -= range_.nbytes

    def view(self, range_: ArenaRange) -> memoryview:
        """The bytes of a range."""
        return self._view[range_.offset : range_.offset + range_.nbytes]

    def close(self) -> None:
        """Lets go of the memory. Views that others still hold keep it alive until they go."""
        os.close(self.fd)
        self._view.release()

    def _shrink(self, i: int, start: int, end: int) -> None:
        """Cuts `[start, end)`, which touches one edge of free run `i`, out of it."""
        if self._starts[i] == start:
            self._starts[i] = end
        else:
            self._ends[i] = start
        if self._starts[i] == self._ends[i]:
            del self._starts[i], self._ends[i]
