"""The ranges of the arena that a process, or its device, may still write to, although its session has ended.

A process that was stopped in the middle of a copy finishes the copy when it wakes up, before it can learn that its
lease is void. So the daemon uses the range for nothing else until the process has closed the arena or has ended; see
tests/integration/test_stopped_clients.py.

The device of a process that has registered the arena writes on its own. If the process is killed, the kernel releases
the process's lock before it closes the process's descriptors of the device, and the driver may stop the device's copies
later still. So the ranges of such a process stay in quarantine until its lock is gone, the process has ended, and
`late_copy_seconds` have passed. If the process cannot be watched, the time counts from the moment at which the lock is
gone. A process that waits for its device before it leaves says so in its slot, and its ranges are freed as soon as its
lock is gone.

This module owns the ranges in quarantine. It must never free one while the client's process holds the lock of its slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from paramserver.sessions.client_process import ClientProcess
from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier
from storage.tiers.slots import ArenaSlot

LOOK_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class Held:
    """The slot of an ended session in the arena, with the ranges that its client may still write to.

    Attributes:
        registers_arena: whether the client's device may write to the ranges, too.
        process: the client's process, or None if the daemon cannot watch it.
        quiet_since: when the lock and the process were first seen to be gone, on the event loop's clock.
    """

    slot: ArenaSlot
    ranges: list[ArenaRange]
    registers_arena: bool = False
    process: ClientProcess | None = None
    quiet_since: float | None = None


class Quarantine:
    """The ranges of the arena that the daemon must not use again yet, because an ended session may write to them.

    While there are any, the quarantine looks from time to time whether the processes that hold the ended slots are
    gone, and frees the ranges of the processes that are gone.
    """

    def __init__(self, host: HostTier, late_copy_seconds: float) -> None:
        self._host = host
        self._late_copy_seconds = late_copy_seconds
        self._held: list[Held] = []
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def ranges(self) -> Iterator[ArenaRange]:
        """The ranges that are in quarantine."""
        return (range_ for held in self._held for range_ in held.ranges)

    @property
    def nbytes(self) -> int:
        """The size in bytes of all ranges that are in quarantine."""
        return sum(range_.nbytes for range_ in self.ranges)

    def hold(self, held: Held) -> None:
        """Keep the ranges of an ended session until neither its process nor its device can write to them any more."""
        self._held.append(held)
        self._look()

    def hold_too(self, held: Held, range_: ArenaRange) -> None:
        """Keep one more range of an ended session whose slot `hold` got.

        Free the range at once if nothing can write to the session's ranges any more.
        """
        if held in self._held:
            held.ranges.append(range_)
        else:
            self._host.free(range_)

    def close(self) -> None:
        """Stop watching the ended slots, because the arena is about to be closed."""
        if self._next_look is not None:
            self._next_look.cancel()
        for held in self._held:
            if held.process is not None:
                held.process.close()
                held.process = None

    def _look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        loop = asyncio.get_running_loop()
        now, before, self._held = loop.time(), self._held, []
        for held in before:
            if self._is_over(held, now):
                self._free(held)
            else:
                self._held.append(held)
        self._next_look = loop.call_later(LOOK_SECONDS, self._look) if self._held else None

    def _free(self, held: Held) -> None:
        if held.process is not None:
            held.process.close()
        self._host.arena.slots.free(held.slot)
        for range_ in held.ranges:
            self._host.free(range_)

    def _is_over(self, held: Held, now: float) -> bool:
        """Return whether neither the client's process nor its device can write to the ranges any more."""
        slots = self._host.arena.slots
        if slots.is_held(held.slot):
            return False
        if not held.ranges or not held.registers_arena or slots.has_left(held.slot):
            return True
        if held.process is not None and not held.process.has_ended():
            return False
        if held.quiet_since is None:
            held.quiet_since = now
        return now - held.quiet_since >= self._late_copy_seconds
