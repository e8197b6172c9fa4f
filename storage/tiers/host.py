"""The host tier: ranges of the arena under its exact budget, with fair waiting that ends at a deadline.

This module owns the arena and the queue of requests that wait for room. It must not choose which copies to evict when
room is short: the `RoomMaker` does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from storage.base.errors import BudgetExceededError
from storage.base.shard import DType, TierName
from storage.base.shown_sizes import least_size, shown_size
from storage.base.slices import in_slices
from storage.base.waiting import Alarm
from storage.tiers.arena import Arena, ArenaRange
from storage.tiers.base import BusyClock, TierCounters, round_up

# Zeros with which a range of the arena is cleared in pieces of this size. One piece takes less than a tenth of a
# millisecond.
_ZEROS = memoryview(bytes(256 << 10))


@dataclass(slots=True)
class _RangeWaiter:
    """A call of `HostTier.allocate` that waits until there is room for its range."""

    nbytes: int
    from_top: bool
    since: float
    granted: asyncio.Future[ArenaRange]


class RoomMaker(Protocol):
    """The order in which copies are evicted from the arena: `storage.memory.host_cache.EvictionOrder`.

    This protocol is declared here and not in host_cache.py, because host_cache.py imports this module.
    """

    @property
    def leased_bytes(self) -> int:
        """Bytes of copies that cannot be evicted because a client or the engine uses them."""
        ...

    def evict(self, later_than: float | None) -> ArenaRange | None:
        """Take the copy with the farthest next use away from its slab, and return its range, which the tier frees.

        Args:
            later_than: evict only a copy whose next use comes after this trace position. None: evict any copy.

        Returns:
            The range of the evicted copy; None if there is no such copy.
        """
        ...


class HostTier:
    """Allocates ranges of the arena, the shared memory that clients on this node map.

    An allocation that finds no room takes back lent memory, evicts copies, or waits in turn.
    """

    name = TierName.HOST
    problems: Sequence[str] = ()
    bandwidth: float | None = None

    def __init__(
        self,
        budget_bytes: int,
        room_maker: RoomMaker,
        take_back: Callable[[], ArenaRange | None],
        *,
        admission_timeout_seconds: float = 60.0,
        slots: int = 0,
        arena_file: Path | None = None,
        huge_pages: bool = False,
        lock_memory: bool = False,
    ) -> None:
        """Allocate the whole budget as one arena; see Arena for `slots`, `huge_pages` and `lock_memory`.

        Args:
            room_maker: evicts copies if an allocation finds no room.
            take_back: called before a copy is evicted: it returns a lent range, which the tier frees, or None.

        Raises:
            DiskFullError: the machine has too little shared memory.
            DeviceError: the machine has no shared memory, or the arena cannot be named `arena_file`.
            ConflictError: another daemon uses `arena_file`.
        """
        self.arena = Arena(budget_bytes, slots=slots, path=arena_file, huge_pages=huge_pages, lock_memory=lock_memory)
        self.counters = TierCounters()
        # A clock that measures the time in which at least one request for room waited.
        self.waiting = BusyClock()
        self._admission_timeout_seconds = admission_timeout_seconds
        self._room_maker = room_maker
        self._take_back = take_back
        self._on_room: list[Callable[[], None]] = []
        self._on_shortage: list[Callable[[], None]] = []
        # For each queue of requests that are served after all allocations, a function that returns the times at which
        # the requests came.
        self._queues_behind: list[Callable[[], Iterable[float]]] = []
        self._waiters: deque[_RangeWaiter] = deque()

    @property
    def budget_bytes(self) -> int:
        """The bytes of the whole arena, with its header."""
        return self.arena.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the allocated ranges and of the arena's own header."""
        return self.arena.used_bytes

    @property
    def queue_depth(self) -> int:
        """The number of requests that wait for room, also those in the queues of `add_queue_behind`."""
        return sum(1 for _ in self._waiting_since())

    @property
    def wanted_bytes(self) -> int:
        """The bytes of all ranges that allocations wait for."""
        return sum(round_up(waiter.nbytes) for waiter in self._waiters)

    @property
    def waiting_seconds(self) -> float:
        """The seconds for which the oldest request that waits for room has waited; 0 if none waits."""
        now = asyncio.get_running_loop().time()
        return now - min(self._waiting_since(), default=now)

    @property
    def detail(self) -> str:
        """A description of the memory as the system granted it: huge pages, locked or not, and its name."""
        collapsed = f"{self.arena.collapsed_bytes / self.arena.size_bytes:.0%} in huge pages"
        granted = (
            ("huge pages", self.arena.huge_pages),
            (collapsed, self.arena.collapsed_bytes > 0),
            ("locked", self.arena.locked),
        )
        named = f"shared memory {self.arena.path}" if self.arena.path else "shared memory"
        return ", ".join([named, *(name for name, is_so in granted if is_so)])

    @property
    def pinned_bytes(self) -> int:
        """Bytes of copies that are leased, being read or being updated."""
        return self._room_maker.leased_bytes

    def when_room_is_made(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a range is freed or can be evicted, after the requests that wait were served."""
        self._on_room.append(callback)

    def when_room_is_short(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a request begins to wait for room, so that the callback can free other ranges."""
        self._on_shortage.append(callback)

    def announce_shortage(self) -> None:
        """Call the callbacks of `when_room_is_short`, because a request begins to wait."""
        for callback in self._on_shortage:
            callback()

    def add_queue_behind(self, waiting_since: Callable[[], Iterable[float]]) -> None:
        """Register a queue of requests that its owner serves only when no allocation waits here.

        Args:
            waiting_since: returns for each request in the queue the time, on the loop's clock, at which it came.
        """
        self._queues_behind.append(waiting_since)

    def _waiting_since(self) -> Iterator[float]:
        """Yield the time at which each waiting request came, also those in the queues of `add_queue_behind`."""
        yield from (waiter.since for waiter in self._waiters)
        for waiting_since in self._queues_behind:
            yield from waiting_since()

    @property
    def is_short(self) -> bool:
        """Whether a request waits for room: an allocation, or a request in a queue of `add_queue_behind`."""
        return any(True for _ in self._waiting_since())

    def deadline(self) -> float:
        """Return the time, on the loop's clock, until which a request that begins now may wait for room."""
        return asyncio.get_running_loop().time() + self._admission_timeout_seconds

    async def allocate(self, nbytes: int, *, from_top: bool = False, until: float | None = None) -> ArenaRange:
        """Wait in turn until a range is free, and return it. Copies are evicted to make room.

        Args:
            from_top: take the range from the top of the arena, where gradients are; see `Arena.allocate`.
            until: the deadline. A request that takes several ranges passes the result of `deadline` from its beginning.
                None: the deadline of a request that begins now.

        Raises:
            BudgetExceededError: `nbytes` is more than the whole arena, or there was no room before the deadline.
        """
        if round_up(nbytes) > self.budget_bytes - self.arena.header_bytes:
            raise BudgetExceededError(
                f"host_budget {shown_size(self.budget_bytes)} cannot hold one range of {shown_size(nbytes)}; "
                f"raise host_budget to more than {least_size(round_up(nbytes) + self.arena.header_bytes)}"
            )
        if not self._waiters and (range_ := self._allocate(nbytes, from_top=from_top, later_than=None)):
            return range_
        loop = asyncio.get_running_loop()
        waiter = _RangeWaiter(nbytes, from_top, loop.time(), loop.create_future())
        self._waiters.append(waiter)
        self.announce_shortage()
        deadline = Alarm(self.deadline() if until is None else until, partial(self._refuse, waiter))
        try:
            with self.waiting:
                return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._leave(waiter)
            elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.free(waiter.granted.result())
            raise
        finally:
            deadline.cancel()

    def try_allocate(self, nbytes: int, later_than: float | None, *, from_top: bool = False) -> ArenaRange | None:
        """Return a range without waiting; None if there is no room, or if tasks wait in `allocate`, which go first.

        Only copies whose next use comes after position `later_than` are evicted, or any copies if it is None.
        """
        if self._waiters:
            return None
        return self._allocate(nbytes, from_top=from_top, later_than=later_than)

    def allocate_free(self, nbytes: int, *, from_top: bool = True, takes_back: bool = False) -> ArenaRange | None:
        """Return a range from the top or bottom of free room; None if there is none, or if a request waits.

        This neither waits nor evicts any copy. With `takes_back`, lent memory counts as free.
        """
        if self.is_short:
            return None
        range_ = self.arena.allocate(nbytes, from_top=from_top)
        while range_ is None and takes_back and (lent := self._take_back()) is not None:
            self._free(lent)
            range_ = self.arena.allocate(nbytes, from_top=from_top)
        if range_ is not None:
            self.counters.moved_bytes += range_.nbytes
        return range_

    def free(self, range_: ArenaRange) -> None:
        """Free a range, and grant the allocations that wait for room, in their order, as far as there is room now."""
        self._free(range_)
        self.room_made()

    def free_all(self, ranges: Sequence[ArenaRange]) -> None:
        """Free ranges, and then serve the allocations that wait for room."""
        for range_ in ranges:
            self._free(range_)
        if ranges:
            self.room_made()

    def room_made(self) -> None:
        """Grant waiting allocations their ranges. The host cache calls this when it has made a copy evictable."""
        self._serve()
        for callback in self._on_room:
            callback()

    def view(self, range_: ArenaRange) -> memoryview:
        """Return the bytes of a range, in whole pages."""
        return self.arena.view(range_)

    def tensor(self, range_: ArenaRange, dtype: DType, numel: int, offset: int = 0) -> torch.Tensor:
        """Return `numel` elements of a range, from element `offset` on, as a 1-D tensor over the same memory."""
        start = offset * dtype.itemsize
        view = self.arena.view(range_)[start : start + numel * dtype.itemsize]
        return torch.frombuffer(view, dtype=dtype.torch)

    async def clear(self, range_: ArenaRange) -> None:
        """Fill a range with zeros. The event loop runs other tasks between pieces of a large range."""
        view = self.arena.view(range_)
        async for start in in_slices(range(0, len(view), len(_ZEROS))):
            piece = view[start : start + len(_ZEROS)]
            piece[:] = _ZEROS[: len(piece)]

    async def read_into(self, range_: ArenaRange, offset: int, buffer: memoryview) -> None:
        """Copy bytes of a range into `buffer`."""
        buffer[:] = self.arena.view(range_)[offset : offset + len(buffer)]
        self.counters.bytes_read += len(buffer)

    async def write_from(self, range_: ArenaRange, offset: int, buffer: memoryview) -> None:
        """Copy `buffer` into a range."""
        self.arena.view(range_)[offset : offset + len(buffer)] = buffer
        self.counters.bytes_written += len(buffer)

    async def close(self) -> None:
        """Close the arena, which frees its memory."""
        self.arena.close()

    def _allocate(self, nbytes: int, *, from_top: bool, later_than: float | None) -> ArenaRange | None:
        while (range_ := self.arena.allocate(nbytes, from_top=from_top)) is None:
            if (lent := self._take_back()) is not None:
                self._free(lent)
                continue
            if (evicted := self._room_maker.evict(later_than)) is None:
                return None
            self.counters.demotions += 1
            # `_free` is called here and not `HostTier.free`, which would give this room to the tasks that wait.
            self._free(evicted)
        self.counters.moved_bytes += range_.nbytes
        return range_

    def _free(self, range_: ArenaRange) -> None:
        self.counters.moved_bytes += range_.nbytes
        self.arena.free(range_)

    def _refuse(self, waiter: _RangeWaiter) -> None:
        """Make the allocation of a request whose deadline has passed raise BudgetExceededError."""
        if waiter.granted.done():
            # The request for room was granted or cancelled in the moment of its deadline, and its task has not run
            # since then. So it is not refused.
            return
        waiter.granted.set_exception(
            BudgetExceededError(
                f"host_budget {shown_size(self.budget_bytes)} had no room for {shown_size(waiter.nbytes)} for "
                f"{self._admission_timeout_seconds:g} s: {shown_size(self.used_bytes)} are used, "
                f"{shown_size(self.pinned_bytes)} of them by copies that are leased, being read or being updated; "
                "return leases sooner, or raise host_budget or admission_timeout_seconds"
            )
        )
        self._leave(waiter)

    def _leave(self, waiter: _RangeWaiter) -> None:
        """Remove a request from the queue, and grant the requests behind it for which there is room."""
        self._waiters.remove(waiter)
        self.room_made()

    def _serve(self) -> None:
        """Grant the first requests of the queue their ranges, as far as there is room; the others go on waiting."""
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.granted.cancelled():
                # The request for room was cancelled, and its task has not run since then to remove it from the queue,
                # so it is removed here.
                self._waiters.popleft()
                continue
            range_ = self._allocate(waiter.nbytes, from_top=waiter.from_top, later_than=None)
            if range_ is None:
                return
            self._waiters.popleft()
            waiter.granted.set_result(range_)
