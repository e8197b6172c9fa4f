"""The gpu tier: the directory of the copies of slabs that sessions keep in the memory of their devices.

The memory belongs to the process of a session, which copies bytes to it and from it. This module owns the accounts: how
much memory each session offers, which version of which slab lies where in it, and which copy gives way to another one.
It must never touch a byte of that memory, nor call a device, so that nothing that goes wrong on a device can reach the
daemon.

[Note: life of a copy] A client that reads a slab copies its bytes to the device anyway. `place` gives the client a
range in which it may keep the bytes, and with `release` the client says whether it has kept them. From then on `find`
leases the copy to the session for as long as its bytes are the newest ones of the slab. A leased range is given to no
other slab; the end of the lease is the client's acknowledgement that its device was given all work on the range, so
that later work on it comes after that.

[Note: which copy gives way] The copy whose next use is farthest gives way first, and only to a copy that is used
sooner: the order in which the host tier evicts. The bytes of frozen parameters have a next use in each step, and those
of trained ones none behind the next update. So where both compete, copies of frozen parameters stay from one step to
the next. Copies of trained parameters stay only within a step, where they are read again (by accumulation, or by the
backward after the forward).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.base.shard import TierName
from storage.base.shown_sizes import shown_size
from storage.tiers.base import TierCounters, round_up
from storage.tiers.free_runs import FreeRuns
from storage.tiers.giving_way import giving_way

# The alignment of device copies in bytes: the allocators of devices align tensors to it, and kernels read whole vectors
# from such an address.
ALIGN_BYTES = 512


class CopiedSlab(Protocol):
    """The part of a `Slab` that the directory needs. It is declared here because slab.py imports from this folder."""

    @property
    def stamp(self) -> int:
        """A number that changes whenever the newest bytes of the slab change, so that a stale copy is recognized."""
        ...

    @property
    def deleted(self) -> bool:
        """Whether the slab was deleted, so that its copies are of no use."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """A range of a session's device memory, with a generation that no other range of the tier has."""

    offset: int
    nbytes: int
    generation: int

    @property
    def end(self) -> int:
        """The byte after the last one of the range."""
        return self.offset + self.nbytes


@dataclass(slots=True, eq=False)
class _Copy:
    """A slab's bytes in a range, or a range that a client is filling with them.

    Attributes:
        stamp: `CopiedSlab.stamp` as it was when the range was leased for the bytes.
        next_use: the trace position of the next use.
        is_filled: whether the client has copied the bytes.
        leases: the number of `find` and `place` calls without their `release`.
    """

    slab: CopiedSlab
    stamp: int
    range_: DeviceRange
    next_use: float
    is_filled: bool = False
    leases: int = 0

    @property
    def offset(self) -> int:
        """The byte of the session's device memory at which the range begins."""
        return self.range_.offset

    @property
    def room_bytes(self) -> int:
        """The bytes of device memory that the copy takes."""
        return round_up(self.range_.nbytes, ALIGN_BYTES)

    @property
    def is_stale(self) -> bool:
        """Whether the bytes are not the newest ones of the slab any more."""
        return self.slab.deleted or self.slab.stamp != self.stamp


class DeviceMemory:
    """The directory of the device memory of one session: it leases ranges and finds copies for the session's client.

    Attributes:
        label: the device and the client, for operators.
        budget_bytes: the memory that the client offers.
        used_bytes: the bytes of all ranges, each rounded up to ALIGN_BYTES.
    """

    def __init__(self, label: str, counters: TierCounters, generations: itertools.count[int]) -> None:
        self.label = label
        self.budget_bytes = 0
        self.used_bytes = 0
        self._counters = counters
        self._generations = generations
        self._free = FreeRuns()
        self._copies: dict[CopiedSlab, _Copy] = {}
        # Device copies whose ranges are freed when their last leases end: they lie beyond the budget, or their bytes
        # are not the newest any more.
        self._leaving: list[_Copy] = []

    @property
    def leased_bytes(self) -> int:
        """The bytes of the ranges that the client is using or filling."""
        return sum(copy.room_bytes for copy in self._holding() if copy.leases)

    @property
    def is_within_budget(self) -> bool:
        """Whether all ranges lie within the budget. After `resize` this may have to wait for the ends of leases."""
        return all(copy.range_.end <= self.budget_bytes for copy in self._leaving)

    def resize(self, budget_bytes: int) -> None:
        """Set the budget. Copies beyond it are dropped: at once, or when their leases end (see `is_within_budget`)."""
        self.budget_bytes = budget_bytes // ALIGN_BYTES * ALIGN_BYTES
        for copy in [copy for copy in self._copies.values() if copy.range_.end > self.budget_bytes]:
            self._drop(copy)
        self._free = FreeRuns()
        taken = sorted((copy.range_.offset, copy.range_.offset + copy.room_bytes) for copy in self._holding())
        free_from = 0
        for start, end in [*taken, (self.budget_bytes, self.budget_bytes)]:
            if free_from < min(start, self.budget_bytes):
                self._free.add(free_from, min(start, self.budget_bytes))
            free_from = max(free_from, end)

    def find(self, slab: CopiedSlab, next_use: float) -> DeviceRange | None:
        """Lease the copy of a slab's newest bytes; None if the session has none.

        Args:
            next_use: the trace position at which the same bytes are needed again after this use.
        """
        copy = self._copies.get(slab)
        if copy is not None and copy.is_stale:
            self._drop(copy)
            copy = None
        if copy is None or not copy.is_filled:
            self._counters.misses += 1
            return None
        copy.leases += 1
        copy.next_use = next_use
        self._counters.hits += 1
        self._counters.bytes_read += copy.range_.nbytes
        return copy.range_

    def has(self, slab: CopiedSlab) -> bool:
        """Return whether the session's device has a copy of the slab's newest bytes, which `find` would lease."""
        copy = self._copies.get(slab)
        return copy is not None and copy.is_filled and not copy.is_stale

    def place(self, slab: CopiedSlab, nbytes: int, next_use: float) -> DeviceRange | None:
        """Lease a range in which the client may keep a slab's newest bytes, which it is about to copy.

        Return None if there is no room, even if all copies that are needed later were dropped.
        """
        if slab in self._copies or not nbytes:
            return None  # The client is copying the same bytes for another use already, or there are none.
        offset = self._allocate(round_up(nbytes, ALIGN_BYTES), next_use)
        if offset is None:
            return None
        range_ = DeviceRange(offset, nbytes, next(self._generations))
        copy = _Copy(slab, slab.stamp, range_, next_use, leases=1)
        self.used_bytes += copy.room_bytes
        self._counters.moved_bytes += copy.room_bytes
        self._copies[slab] = copy
        return range_

    def release(self, slab: CopiedSlab, range_: DeviceRange, *, is_kept: bool = True) -> None:
        """End a lease of `find` or `place`.

        Args:
            is_kept: for a range that `place` has given, whether the client has copied the bytes to it. If so, `find`
                finds them from now on; if not, the range is freed.
        """
        copy = next(copy for copy in self._of(slab) if copy.range_ == range_)
        copy.leases -= 1
        if not copy.is_filled:
            if is_kept:
                copy.is_filled = True
                self._counters.promotions += 1
                self._counters.bytes_written += range_.nbytes
            elif copy not in self._leaving:
                self._drop(copy)
                return
        if copy in self._leaving and not copy.leases:
            self._leaving.remove(copy)
            self._free_range(copy)

    def _of(self, slab: CopiedSlab) -> Iterator[_Copy]:
        """Yield the copy of a slab, and the slab's older copies whose leases have not ended yet."""
        if slab in self._copies:
            yield self._copies[slab]
        yield from (copy for copy in self._leaving if copy.slab is slab)

    def _holding(self) -> list[_Copy]:
        return [*self._copies.values(), *self._leaving]

    def _drop(self, copy: _Copy) -> None:
        """Forget a copy, and free its range as soon as the client does not use the range."""
        del self._copies[copy.slab]
        if copy.leases:
            self._leaving.append(copy)
        else:
            self._free_range(copy)

    def _free_range(self, copy: _Copy) -> None:
        start, end = copy.range_.offset, copy.range_.offset + copy.room_bytes
        self.used_bytes -= end - start
        self._counters.moved_bytes += end - start
        if start < self.budget_bytes:
            self._free.add(start, min(end, self.budget_bytes))

    def _allocate(self, room: int, next_use: float) -> int | None:
        """Allocate a range of `room` bytes and return its offset; None if there is no room.

        Copies that are needed later than `next_use` are dropped to make room.
        """
        index = self._free.shortest_fit(room)
        if index is None:
            for copy in self._giving_way(room, next_use):
                if not copy.is_stale:
                    self._counters.demotions += 1
                self._drop(copy)
            index = self._free.shortest_fit(room)
        return None if index is None else self._free.cut(index, room)

    def _giving_way(self, room: int, next_use: float) -> Sequence[_Copy]:
        """Return the copies to drop so that a range of this size is free; none if dropping copies cannot free one."""
        idle = [copy for copy in self._copies.values() if not copy.leases]
        candidates = [copy for copy in idle if copy.is_stale or copy.next_use > next_use]
        candidates.sort(key=lambda copy: (copy.is_stale, copy.next_use), reverse=True)
        return giving_way(self._free, room, candidates)


class GpuTier:
    """The directories of the device memory of all sessions. It reports their sums as a `Tier` (see contract.py).

    Attributes:
        is_in_use: whether a session has offered device memory since the start of the daemon.
    """

    name = TierName.GPU
    problems: Sequence[str] = ()
    bandwidth: float | None = None
    # No request waits for room on this tier, because `DeviceMemory.place` returns None instead.
    queue_depth = 0

    def __init__(self) -> None:
        self.counters = TierCounters()
        self._generations = itertools.count(1)
        self._memories: list[DeviceMemory] = []
        self.is_in_use = False

    @property
    def budget_bytes(self) -> int:
        """The device memory that the sessions offer."""
        return sum(memory.budget_bytes for memory in self._memories)

    @property
    def used_bytes(self) -> int:
        """Bytes of the copies in device memory, and of ranges that clients are filling with copies."""
        return sum(memory.used_bytes for memory in self._memories)

    @property
    def leased_bytes(self) -> int:
        """The part of `used_bytes` that clients are using or filling now."""
        return sum(memory.leased_bytes for memory in self._memories)

    @property
    def detail(self) -> str:
        """A text with the used and the offered device memory of each session."""
        return "; ".join(
            f"{m.label}: {shown_size(m.used_bytes)} of {shown_size(m.budget_bytes)}" for m in self._memories
        )

    def open(self, label: str) -> DeviceMemory:
        """Return the directory of a session's device memory, without a budget yet."""
        memory = DeviceMemory(label, self.counters, self._generations)
        self._memories.append(memory)
        self.is_in_use = True
        return memory

    def close_memory(self, memory: DeviceMemory) -> None:
        """Forget a session's device memory, which its process frees, or has freed by its end."""
        self._memories.remove(memory)
        self.counters.moved_bytes += memory.used_bytes

    async def close(self) -> None:
        """Do nothing, because the memory is that of other processes."""
