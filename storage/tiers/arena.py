"""The arena: one region of shared memory behind the host tier, and the exact-size, page-aligned allocator over it.

Owns the memory and the free list. Knows nothing of what the ranges hold. Every range carries a generation number that
no other range ever had, so that a late reference to a reused range can be told from a good one.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
from dataclasses import dataclass

from storage import syscalls
from storage.tiers.base import PAGE_BYTES, round_up
from storage.tiers.free_runs import FreeRuns

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
        self._free = FreeRuns()
        self._free.add(PAGE_BYTES, self.size_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated ranges, with the first page."""
        return self.size_bytes - self._free.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest range that can be allocated now."""
        return max(self._free.lengths(), default=0)

    def allocate(self, nbytes: int, *, from_top: bool = False) -> ArenaRange | None:
        """Takes whole pages for `nbytes`, lowest or highest (`from_top`) first; None where no run is long enough.

        What lives for a step (gradients) comes from the top and what comes and goes from the bottom, so that the two do
        not fragment each other.
        """
        need = round_up(nbytes)
        fitting = [i for i, length in enumerate(self._free.lengths()) if length >= need]
        if not fitting:
            return None
        offset = self._free.cut(fitting[-1 if from_top else 0], need, from_top=from_top)
        return ArenaRange(offset, need, next(self._generations))

    def free(self, range_: ArenaRange) -> None:
        """Gives a range back."""
        self._free.add(range_.offset, range_.offset + range_.nbytes)

    def view(self, range_: ArenaRange) -> memoryview:
        """The bytes of a range."""
        return self._view[range_.offset : range_.offset + range_.nbytes]

    def close(self) -> None:
        """Lets go of the memory. Views that others still hold keep it alive until they go."""
        os.close(self.fd)
        self._view.release()
