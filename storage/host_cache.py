"""Which copies stay in the host tier: pins, and eviction by next use.

A step uses slabs in an order that repeats, so the copy whose next use is farthest goes first; least-recently-used order
would hit nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from storage.slab import NEVER, HostCopy, Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier


class EvictionOrder:
    """Which copies in the host tier are in use, and in which order the others are evicted."""

    def __init__(self) -> None:
        self._evictable: dict[HostCopy, Slab] = {}
        # A heap of (negated next use, sequence, copy). Entries that do not hold any more are left in it until they come
        # to its top, or are the most of it.
        self._by_next_use: list[tuple[float, int, HostCopy]] = []
        self._sequence = itertools.count()
        self.pinned: set[HostCopy] = set()

    @property
    def leased_bytes(self) -> int:
        """Bytes of copies in use."""
        return sum(copy.region.nbytes for copy in self.pinned)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of copies that can be dropped at once."""
        return sum(copy.region.nbytes for copy in self._evictable)

    def offer(self, slab: Slab, copy: HostCopy) -> None:
        """Let a copy be evicted from now on."""
        self._evictable[copy] = slab
        self._rank(copy)

    def withdraw(self, copy: HostCopy) -> None:
        """Keep a copy from being evicted; idempotent."""
        self._evictable.pop(copy, None)

    def move(self, copy: HostCopy) -> None:
        """Take in that the next use of a copy has changed, if the copy can be evicted."""
        if copy in self._evictable:
            self._rank(copy)

    def evict(self, later_than: float | None) -> ArenaRange | None:
        """Take from its slab the copy that is needed last, if that is after the position `later_than` (None: any).

        Returns its range, which is the caller's to free; None where there is no such copy.
        """
        copy = self._farthest()
        if copy is None or (later_than is not None and copy.next_use <= later_than):
            return None
        self._evictable.pop(copy).copy = None
        return copy.region

    def _rank(self, copy: HostCopy) -> None:
        """Makes a copy that can be dropped known by its next use."""
        heapq.heappush(self._by_next_use, (-copy.next_use, next(self._sequence), copy))
        if len(self._by_next_use) > 2 * len(self._evictable) + 64:
            self._by_next_use = [entry for entry in self._by_next_use if self._holds(entry)]
            heapq.heapify(self._by_next_use)

    def _holds(self, entry: tuple[float, int, HostCopy]) -> bool:
        negated, _, copy = entry
        return copy in self._evictable and copy.next_use == -negated

    def _farthest(self) -> HostCopy | None:
        """Of the copies that can be dropped the one that is needed last; of those alike the one known longest."""
        while self._by_next_use and not self._holds(self._by_next_use[0]):
            heapq.heappop(self._by_next_use)
        return self._by_next_use[0][2] if self._by_next_use else None


class HostCache:
    """All copies in the host tier. A copy without pins, away from home, can be dropped at any time."""

    def __init__(self, host: HostTier, order: EvictionOrder) -> None:
        """`order` is the one that makes room in `host`."""
        self._host = host
        self._order = order

    @property
    def pinned_ranges(self) -> Iterable[ArenaRange]:
        """Ranges of copies in use."""
        return (copy.region for copy in self._order.pinned)

    @property
    def leased_bytes(self) -> int:
        """Bytes of copies in use."""
        return self._order.leased_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of copies that can be dropped at once."""
        return self._order.evictable_bytes

    async def room_for(self, slab: Slab, *, until: float | None = None) -> ArenaRange:
        """Wait for a range that a copy of a slab fits into; `until` is the deadline, see HostTier.allocate.

        Raises:
            ConflictError: the slab was deleted while this waited.
            BudgetExceededError: there was no room before the deadline.
        """
        region = await self._host.allocate(slab.nbytes, until=until)
        if slab.deleted:
            self._host.free(region)
            slab.check_present()
        return region

    def pin(self, copy: HostCopy) -> None:
        """Keeps a copy where it is until it is unpinned as often."""
        copy.pins += 1
        copy.idle.clear()
        self._order.pinned.add(copy)
        self._order.withdraw(copy)

    def unpin(self, slab: Slab, copy: HostCopy, next_use: float = NEVER) -> None:
        """Takes a pin back. A copy that nobody uses any more, and that does not hold the newest bytes, is dropped."""
        copy.pins -= 1
        copy.next_use = next_use
        if copy.pins:
            return
        copy.idle.set()
        self._order.pinned.discard(copy)
        if slab.copy is not copy or (slab.current_copy is None and not copy.at_home):
            self._drop(slab, copy)
        elif not copy.at_home:
            self._offer(slab, copy)

    def lend(self, slab: Slab, copy: HostCopy) -> None:
        """Takes back the only pin of a copy away from home that is being written, for whoever needs the room: until it
        is pinned again, it can be dropped, and is not the slab's any more then."""
        copy.pins -= 1
        copy.idle.set()
        self._order.pinned.discard(copy)
        self._offer(slab, copy)

    def surrender(self, slab: Slab, copy: HostCopy) -> ArenaRange:
        """Takes back the only pin of a copy that holds nothing, and the copy from its slab; the range is the
        caller's."""
        copy.pins -= 1
        copy.idle.set()
        self._order.pinned.discard(copy)
        if slab.copy is copy:
            slab.copy = None
        return copy.region

    def adopt(self, slab: Slab, copy: HostCopy) -> None:
        """Makes a copy that nobody uses yet that of a slab without one."""
        slab.copy = copy
        self.pin(copy)
        self.unpin(slab, copy)

    def detach(self, slab: Slab) -> None:
        """Lets the slab's copy go, at home or not: now if it is idle, else when its last pin is taken back."""
        copy, slab.copy = slab.copy, None
        if copy is not None and not copy.pins:
            self._order.withdraw(copy)
            self._host.free(copy.region)

    def set_next_use(self, slab: Slab, position: float) -> None:
        """Says when an idle copy is needed, for those that nobody fetched through a lease."""
        copy = slab.copy
        if copy is not None and copy.next_use != position:
            copy.next_use = position
            self._order.move(copy)

    def _offer(self, slab: Slab, copy: HostCopy) -> None:
        """Lets a copy be dropped from now on."""
        self._order.offer(slab, copy)
        self._host.room_made()

    def _drop(self, slab: Slab, copy: HostCopy) -> None:
        self._order.withdraw(copy)
        if slab.copy is copy:
            slab.copy = None
        self._host.free(copy.region)
