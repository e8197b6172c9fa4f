"""The arena: the shared memory behind the host tier, and its allocator of exact, page-aligned ranges.

This module owns the memory and the free list; its methods can be called on any thread. It does not know what the ranges
hold. Every range has a generation number that no other range ever had, so a late reference to a range that was reused
is recognized.

The first pages are the header:
- the nonce, random bytes that the daemon also sends to clients: a client that finds them in the memory that it has
  mapped knows that it is on the daemon's machine;
- the mark, by which a file is recognized as an arena;
- the settled word: how many bytes, from the beginning of the arena, the collapser thread has passed. Clients register
  only these bytes with the driver of their device, because the driver pins them, and the kernel cannot move pinned
  pages into huge pages;
- the slots (see slots.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from storage.base import syscalls
from storage.base.errors import DeviceError
from storage.tiers.base import PAGE_BYTES, round_up
from storage.tiers.free_runs import FreeRuns
from storage.tiers.slots import FIRST_SLOT_BYTE, SLOT_BYTES, Slots

log = logging.getLogger(__name__)

NAME = "paramserver-arena"
NONCE_BYTES = 32
MARK = b"paramserver-arn1"
SETTLED_BYTE = NONCE_BYTES + len(MARK)
_WORD_BYTES = 8
# No range of the arena crosses a multiple of this many bytes, unless the range is longer. Clients register the arena
# with the driver of their device in pieces of this size, and drivers refuse a copy that crosses from one registered
# piece into another, or into memory that is not registered.
PIECE_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class ArenaRange:
    """An allocated range: `nbytes` (whole pages) at byte `offset` of the arena."""

    offset: int
    nbytes: int
    generation: int


class Arena:
    """The shared memory of the host tier, and the allocator of ranges in it. All its pages are allocated at once."""

    def __init__(
        self,
        size_bytes: int,
        *,
        slots: int = 0,
        path: Path | None = None,
        huge_pages: bool = False,
        lock_memory: bool = False,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Allocate and map the memory.

        Args:
            size_bytes: the size with the header; rounded down to whole pages.
            slots: the number of slots in the header, of which each session that maps the arena needs one.
            path: the name of the memory on a tmpfs; None if it gets no name.
            huge_pages: use reserved huge pages. If the system refuses, a warning is logged and ordinary ones are used.
            piece_bytes: no range crosses a multiple of this, unless the range is longer than this; a multiple of a
                page.
            lock_memory: lock the memory. If the system refuses, a warning is logged and the arena can be swapped out.

        Raises:
            DiskFullError: the machine does not have that much shared memory available.
            DeviceError: the kernel refuses to create shared memory, or shared memory with that name.
            ConflictError: the arena of another daemon has that name.
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
        self._piece_bytes = piece_bytes
        self._free = FreeRuns(piece_bytes)
        self._free.add(self.header_bytes, self.size_bytes)
        # The bytes of the arena that its thread has moved from ordinary pages into huge ones so far.
        self.collapsed_bytes = 0
        self._closing = threading.Event()
        self._collapser = threading.Thread(target=self._collapse, name="arena-huge-pages", daemon=True)
        if self.huge_pages:
            self._settle(self.size_bytes)
        else:
            self._collapser.start()

    def _create(self, path: Path | None) -> int:
        if path is None:
            return syscalls.create_shared_memory(NAME, self.size_bytes)
        return syscalls.create_named_shared_memory(
            path, self.size_bytes, MARK, mark_at=NONCE_BYTES, key="arena_file", budget="host_budget"
        )

    def _collapse(self) -> None:
        """Move the memory into huge pages while it is in use. This takes 0.3 to 3 s for each GiB (measured)."""
        try:
            for end, nbytes in syscalls.collapse_pages(self.fd, self.size_bytes):
                self.collapsed_bytes += nbytes
                if self._closing.is_set():
                    return
                self._settle(end)
        except DeviceError as error:
            log.warning("the arena stays in ordinary pages: %s", error)
        self._settle(self.size_bytes)

    def _settle(self, nbytes: int) -> None:
        """Write the settled word: from now on, the collapser thread does not move the first `nbytes` bytes."""
        self._view[SETTLED_BYTE : SETTLED_BYTE + _WORD_BYTES] = nbytes.to_bytes(_WORD_BYTES, "little")

    @property
    def settled_bytes(self) -> int:
        """How many bytes, from the arena's beginning, the collapser thread does not move to huge pages any more."""
        return int.from_bytes(self._view[SETTLED_BYTE : SETTLED_BYTE + _WORD_BYTES], "little")

    def finish_collapse(self) -> int:
        """Wait until the collapser thread has ended, and return the bytes that it has moved into huge pages."""
        if self._collapser.ident is not None:
            self._collapser.join()
        return self.collapsed_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of the header and of all allocated ranges."""
        with self._lock:
            return self.size_bytes - self._free.free_bytes

    def allocate(self, nbytes: int, *, from_top: bool = False) -> ArenaRange | None:
        """Allocate whole pages for `nbytes`; None if no free run is long enough.

        Ranges that live for a step (gradients) are allocated from the top, and short-lived ones from the bottom. So
        they do not fragment each other's space.
        """
        need = round_up(nbytes)
        with self._lock:
            if need > self._piece_bytes:
                start = self._free.take_across(need)
                return None if start is None else ArenaRange(start, need, next(self._generations))
            run = self._free.highest_fit(need) if from_top else self._free.lowest_fit(need)
            if run is None:
                return None
            offset = self._free.cut(run, need, from_top=from_top)
            return ArenaRange(offset, need, next(self._generations))

    def free(self, range_: ArenaRange) -> None:
        """Free a range that `allocate` returned."""
        with self._lock:
            self._free.add(range_.offset, range_.offset + range_.nbytes)

    def view(self, range_: ArenaRange) -> memoryview:
        """Return a view of the bytes of a range."""
        return self._view[range_.offset : range_.offset + range_.nbytes]

    def close(self) -> None:
        """Unlink, close and release the memory. It stays mapped as long as views of it exist."""
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
