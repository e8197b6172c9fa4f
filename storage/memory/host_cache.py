"""The cache of slab copies in the host tier: which copies are pinned, and in which order the others are evicted.

This module must evict the copy with the farthest next use first, because training steps use the slabs in an order that
repeats. Least-recently-used order would always evict the slab that is needed next.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from storage.state.slab import NEVER, HostCopy, Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier


class EvictionOrder:
    """The set of copies in use, and the order in which the other copies in the host tier are evicted.

    The host tier evicts copies in this order when an allocation finds no room.
    """

    def __init__(self) -> None:
        self._evictable: dict[HostCopy, Slab] = {}
        # The copies that can be evicted, as a heap of (negated next use, sequence number, copy). An outdated entry
        # stays in the heap until it comes to the top, or until outdated entries are more than half of the heap.
        self._by_next_use: list[tuple[float, int, HostCopy]] = []
        self._sequence = itertools.count()
        self.pinned: set[HostCopy] = set()

    @property
    def leased_bytes(self) -> int:
        """The bytes of the copies that are pinned, because a client or the engine uses them."""
        return sum(copy.arena_range.nbytes for copy in self.pinned)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of copies that can be evicted at once."""
        return sum(copy.arena_range.nbytes for copy in self._evictable)

    def add(self, slab: Slab, copy: HostCopy) -> None:
        """Make a copy evictable, because its last pin was released."""
        self._evictable[copy] = slab
        self._rank(copy)

    def remove(self, copy: HostCopy) -> None:
        """Remove a copy from those that can be evicted; a repeated call has no effect."""
        self._evictable.pop(copy, None)

    def update(self, copy: HostCopy) -> None:
        """Update the order after the next use of a copy has changed. A copy that cannot be evicted is ignored."""
        if copy in self._evictable:
            self._rank(copy)

    def evict(self, later_than: float | None) -> ArenaRange | None:
        """Take the copy with the farthest next use away from its slab, and return its range, which the caller frees.

        Args:
            later_than: evict only a copy whose next use comes after this trace position. None: evict any copy.

        Returns:
            The range of the evicted copy; None if there is no such copy.
        """
        copy = self._farthest()
        if copy is None or (later_than is not None and copy.next_use <= later_than):
            return None
        self._evictable.pop(copy).copy = None
        return copy.arena_range

    def can_evict(self, copy: HostCopy) -> bool:
        """Return whether a copy is among those that can be evicted: it has no pin, and is not at home."""
        return copy in self._evictable

    def _rank(self, copy: HostCopy) -> None:
        """Enter a copy into the heap that orders the evictable copies by their next use."""
        heapq.heappush(self._by_next_use, (-copy.next_use, next(self._sequence), copy))
        if len(self._by_next_use) > 2 * len(self._evictable) + 64:
            self._by_next_use = [entry for entry in self._by_next_use if self._holds(entry)]
            heapq.heapify(self._by_next_use)

    def _holds(self, entry: tuple[float, int, HostCopy]) -> bool:
        """Return whether a heap entry is up to date.

        An entry is up to date if its copy can be evicted and has the entry's next use.
        """
        negated, _, copy = entry
        return copy in self._evictable and copy.next_use == -negated

    def _farthest(self) -> HostCopy | None:
        """Return the evictable copy with the farthest next use; among equal ones, the one that was entered first."""
        while self._by_next_use and not self._holds(self._by_next_use[0]):
            heapq.heappop(self._by_next_use)
        return self._by_next_use[0][2] if self._by_next_use else None


class HostCache:
    """Pins, evicts and frees the slabs' copies in the host tier.

    A copy without pins can be evicted, unless its slab is placed in the host tier.
    """

    def __init__(self, host: HostTier, order: EvictionOrder) -> None:
        """Manage the copies in `host`. `order` is the eviction order that `host` uses to make room."""
        self._host = host
        self._order = order

    @property
    def pinned_ranges(self) -> Iterable[ArenaRange]:
        """The ranges of the arena that hold pinned copies."""
        return (copy.arena_range for copy in self._order.pinned)

    @property
    def leased_bytes(self) -> int:
        """The bytes of the copies that are pinned, because a client or the engine uses them."""
        return self._order.leased_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of copies that can be evicted at once."""
        return self._order.evictable_bytes

    async def room_for(self, slab: Slab, *, until: float | None = None) -> ArenaRange:
        """Wait for a range of the arena that is large enough for a copy of a slab, and return it.

        Args:
            until: the deadline, see `HostTier.allocate`.

        Raises:
            ConflictError: the slab was deleted while this waited.
            BudgetExceededError: there was no room before the deadline.
        """
        range_ = await self._host.allocate(slab.nbytes, until=until)
        if slab.deleted:
            self._host.free(range_)
            slab.check_present()
        return range_

    def pin(self, copy: HostCopy) -> None:
        """Keep a copy in its place until each of its pins is released."""
        copy.pins += 1
        copy.idle.clear()
        self._order.pinned.add(copy)
        self._order.remove(copy)

    def pin_to_write(self, copy: HostCopy) -> None:
        """Pin a copy that has no pins, and mark its bytes as invalid, because the caller writes other bytes to it."""
        copy.step = None
        copy.is_written = True
        self.pin(copy)

    def unpin(self, slab: Slab, copy: HostCopy, next_use: float = NEVER) -> None:
        """Release a pin.

        When the last pin of a copy that is not at home is released, the copy is freed if it does not hold its slab's
        newest bytes; otherwise it can be evicted from then on.
        """
        copy.pins -= 1
        copy.next_use = next_use
        if copy.pins:
            return
        copy.is_written = False
        copy.idle.set()
        self._order.pinned.discard(copy)
        if slab.copy is not copy or (slab.current_copy is None and not copy.at_home):
            self._free(slab, copy)
        elif not copy.at_home:
            self._add_evictable(slab, copy)

    def make_evictable(self, slab: Slab, copy: HostCopy) -> None:
        """Release the only pin of a copy that an update is writing, so that it can be evicted while the update waits.

        The copy is not at home. If it was evicted before the update pins it again, the slab has no copy any more.
        `copy` is freed at once if a fetch has given the slab another copy, because only the slab's own copy may be
        among those that can be evicted.
        """
        copy.pins -= 1
        copy.idle.set()
        self._order.pinned.discard(copy)
        if slab.copy is copy:
            self._add_evictable(slab, copy)
        else:
            self._free(slab, copy)

    def take_range(self, slab: Slab, copy: HostCopy) -> ArenaRange:
        """Release the only pin of a copy without valid bytes, take the copy away from its slab, and return its range.

        The caller frees the range.
        """
        copy.pins -= 1
        copy.idle.set()
        self._order.pinned.discard(copy)
        if slab.copy is copy:
            slab.copy = None
        return copy.arena_range

    def adopt(self, slab: Slab, copy: HostCopy) -> None:
        """Make `copy`, which no task uses yet, the copy of a slab that has none."""
        slab.copy = copy
        self.pin(copy)
        self.unpin(slab, copy)

    def free_copy(self, slab: Slab) -> None:
        """Take the copy away from its slab, even a copy at home.

        The copy is freed now if it has no pins, and otherwise when its last pin is released.
        """
        copy, slab.copy = slab.copy, None
        if copy is not None and not copy.pins:
            self._order.remove(copy)
            self._host.free(copy.arena_range)

    def evict(self, slab: Slab) -> bool:
        """Evict the copy of a slab if it can be evicted, and return whether it was."""
        if slab.copy is None or not self._order.can_evict(slab.copy):
            return False
        self._host.counters.demotions += 1
        self.free_copy(slab)
        return True

    def set_next_use(self, slab: Slab, position: float) -> None:
        """Set the trace position at which the slab's copy is needed next, for example from a prefetch window."""
        copy = slab.copy
        if copy is not None and copy.next_use != position:
            copy.next_use = position
            self._order.update(copy)

    def _add_evictable(self, slab: Slab, copy: HostCopy) -> None:
        """Add a copy to those that can be evicted, and serve the tasks that wait for room."""
        self._order.add(slab, copy)
        self._host.room_made()

    def _free(self, slab: Slab, copy: HostCopy) -> None:
        """Free a copy, and take it away from its slab if it is the slab's."""
        self._order.remove(copy)
        if slab.copy is copy:
            slab.copy = None
        self._host.free(copy.arena_range)
