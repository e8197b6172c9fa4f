"""Ranges of the arena that a process may still write to, although its session has ended.

A stopped process that wakes up in the middle of a copy finishes it before it can learn that its lease is void: what it
was writing to is nobody's until the process has let go of the arena. Owns those ranges; costs nothing while there are
none.
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
    """Looks from time to time whether the holders of ended slots are gone, and gives back what they held."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._held: dict[Slot, Sequence[ArenaRange]] = {}
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def ranges(self) -> Iterator[ArenaRange]:
        """The ranges that are held back."""
        return (range_ for ranges in self._held.values() for range_ in ranges)

    @property
    def nbytes(self) -> int:
        """Bytes that are held back."""
        return sum(range_.nbytes for range_ in self.ranges)

    def hold(self, slot: Slot, ranges: Sequence[ArenaRange]) -> None:
        """Keeps an ended slot, and what its holder may write to, until the holder has let go of it."""
        self._held[slot] = ranges
        self._look()

    def close(self) -> None:
        """Stops looking: the arena is about to go."""
        if self._next_look is not None:
            self._next_look.cancel()

    def _look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        slots = self._host.arena.slots
        for slot in [slot for slot in self._held if not slots.is_held(slot)]:
            ranges = self._held.pop(slot)
            slots.give_back(slot)
            for range_ in ranges:
                self._host.free(range_)
        self._next_look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look) if self._held else None
