"""The arena: one region of shared memory behind the host tier, and the exact-size, page-aligned allocator over it.

Owns the memory and the free list; safe from any thread. Knows nothing of what the ranges hold. Every range carries a
generation number that no other range ever had, so that a late reference to a reused range can be told from a good one.

The first pages are the header: the nonce that proves locality, a mark by which a file is known as an arena, then the
slots (see slots.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from storage import syscalls
from storage.errors import DeviceError
from storage.tiers.base import PAGE_BYTES, round_up
from storage.tiers.free_runs import FreeRuns
from storage.tiers.slots import FIRST_SLOT_BYTE, SLOT_BYTES, Slots

log = logging.getLogger(__name__)

NAME = "paramserver-arena"
NONCE_BYTES = 32
MARK = b"paramserver-arn1"


@dataclass(frozen=True, slots=True)
class ArenaRange:
    """`nbytes` (whole pages) at byte `offset` of the arena."""

    offset: int
    nbytes: int
    generation: int


class Arena:
    """Shared memory, fully allocated at construction."""

    def __init__(
        self,
        size_bytes: int,
        *,
        slots: int = 0,
        path: Path | None = None,
        huge_pages: bool = False,
        lock_memory: bool = False,
    ) -> None:
        """Takes `size_bytes`, rounded down to whole pages, with room for `slots` slots in the header.

        The memory has the name `path`, where one is given. Where the system does not grant `huge_pages` or
        `lock_memory`, it warns and goes on without.

        Raises:
            DiskFullError: the machine has not that much shared memory.
            DeviceError: it has none at all, or no memory can have that name.
            ConflictError: the memory of another daemon has that name.
        """
        huge_fd = _create_in_huge_pages(size_bytes) if huge_pages and path is None else None
        self.huge_pages = huge_fd is not None
        self.size_bytes = _round_down(size_bytes, syscalls.HUGE_PAGE_BYTES if self.huge_pages else PAGE_BYTES)
        self.path = path
        self.fd = self._create(path) if huge_fd is None else huge_fd
        self._view = syscalls.map_shared_memory(self.fd, self.size_bytes)
        self.locked = lock_memory and _lock(self._view)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._view[:NONCE_BYTES] = self.nonce
        self.header_bytes = round_up(FIRST_SLOT_BYTE + slots * SLOT_BYTES)
        self.slots = Slots(self._view[: self.header_bytes], self.fd, slots)
        self._generations = itertools.count(1)
        self._lock = threading.Lock()
        self._free = FreeRuns()
        self._free.add(self.header_bytes, self.size_bytes)
        # Of ordinary pages, those that have become huge ones meanwhile.
        self.collapsed_bytes = 0
        self._closing = threading.Event()
        self._collapser = threading.Thread(target=self._collapse, name="arena-huge-pages", daemon=True)
        if not self.huge_pages:
            self._collapser.start()

    def _create(self, path: Path | None) -> int:
        if path is None:
            return syscalls.create_shared_memory(NAME, self.size_bytes)
        return syscalls.create_named_shared_memory(path, self.size_bytes, MARK, mark_at=NONCE_BYTES)

    def _collapse(self) -> None:
        """Takes 0.3 to 3 seconds for each GiB (measured), beside whatever the memory is used for."""
        try:
            for nbytes in syscalls.collapse_pages(self.fd, self.size_bytes):
                self.collapsed_bytes += nbytes
                if self._closing.is_set():
                    return
        except DeviceError as error:
            log.warning("the arena stays in ordinary pages: %s", error)

    def finish_collapse(self) -> int:
        """Waits until the pages are as huge as they get; bytes in huge ones that were ordinary."""
        if self._collapser.ident is not None:
            self._collapser.join()
        return self.collapsed_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated ranges, with the header."""
        with self._lock:
            return self.size_bytes - self._free.free_bytes

    def allocate(self, nbytes: int, *, from_top: bool = False) -> ArenaRange | None:
        """Takes whole pages for `nbytes`, lowest or highest (`from_top`) first; None where no run is long enough.

        What lives for a step (gradients) comes from the top and what comes and goes from the bottom, so that the two do
        not fragment each other.
        """
        need = round_up(nbytes)
        with self._lock:
            run = self._free.highest_fit(need) if from_top else self._free.lowest_fit(need)
            if run is None:
                return None
            offset = self._free.cut(run, need, from_top=from_top)
            return ArenaRange(offset, need, next(self._generations))

    def free(self, range_: ArenaRange) -> None:
        """Gives a range back."""
        with self._lock:
            self._free.add(range_.offset, range_.offset + range_.nbytes)

    def view(self, range_: ArenaRange) -> memoryview:
        """The bytes of a range."""
        return self._view[range_.offset : range_.offset + range_.nbytes]

    def close(self) -> None:
        """Lets go of the memory. Views that others still hold keep it alive until they go."""
        self._closing.set()
        self.finish_collapse()
        if self.path is not None:
            syscalls.unlink_shared_memory(self.path, self.fd)
        os.close(self.fd)
        self.slots.close()
        self._view.release()


def _create_in_huge_pages(size_bytes: int) -> int | None:
    try:
        return syscalls.create_huge_shared_memory(NAME, _round_down(size_bytes, syscalls.HUGE_PAGE_BYTES))
    except DeviceError as error:
        log.warning("%s. Ordinary pages are used", error)
        return None


def _lock(memory: memoryview) -> bool:
    try:
        syscalls.lock_memory(memory)
    except DeviceError as error:
        log.warning("%s. The arena can be swapped out", error)
        return False
    return True


def _round_down(nbytes: int, unit: int) -> int:
    return nbytes // unit * unit
