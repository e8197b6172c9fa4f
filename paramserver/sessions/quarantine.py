"""The ranges of the arena that a process may still write to, although its session has ended.

A process that was stopped in the middle of a copy finishes the copy when it wakes up, before it can learn that its
lease is void. So the daemon uses the range for nothing else until the process has closed the arena or has ended; see
tests/integration/test_stopped_clients.py. Owns those ranges. Must never free one while the process holds its slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier
from storage.tiers.slots import Slot

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


class Quarantine:
    """The ranges that the daemon may not use again yet.

    While there are any, the quarantine looks from time to time whether the processes that hold the ended slots are
    gone, and frees the ranges of those that are.
    """

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._held: dict[Slot, Sequence[ArenaRange]] = {}
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def ranges(self) -> Iterator[ArenaRange]:
        """The ranges that are in quarantine."""
        return (range_ for ranges in self._held.values() for range_ in ranges)

    @property
    def nbytes(self) -> int:
        """The size in bytes of all ranges that are in quarantine."""
        return sum(range_.nbytes for range_ in self.ranges)

    def hold(self, slot: Slot, ranges: Sequence[ArenaRange]) -> None:
        """Keep an ended slot, and the ranges its process may write to, until the process closes the arena or ends."""
        self._held[slot] = ranges
        self._look()

    def close(self) -> None:
        """Stop looking, because the arena is about to be closed."""
        if self._next_look is not None:
            self._next_look.cancel()

    def _look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        slots = self._host.arena.slots
        for slot in [slot for slot in self._held if not slots.is_held(slot)]:
            ranges = self._held.pop(slot)
            slots.free(slot)
            for range_ in ranges:
                self._host.free(range_)
        self._next_look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look) if self._held else None
