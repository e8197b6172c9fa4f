"""Ranges of readers' steps in the arena, which all sessions that lease the same bytes at the same time share.

So if several processes read the same step, for example to serve one model, the bytes are in the arena only once. This
module owns the count of leases of each range. It must never let a session see another step than its reader's: two
readers share a range only if they hold the same commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

from storage.engine import Engine
from storage.steps.reader import StepReader
from storage.tiers.arena import ArenaRange


@dataclass(slots=True, eq=False)
class SharedRange:
    """A range of the arena with bytes of a step.

    Attributes:
        subject: the commit whose bytes these are, and which of its bytes were wanted.
        leases: the number of leases on the range.
        arena_range: the range; None until the bytes are there.
        ended: set when the bytes are there, or could not be read.
    """

    subject: tuple[object, Hashable]
    leases: int = 1
    arena_range: ArenaRange | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SharedRanges:
    """The table of the ranges of readers' steps that are leased or being read, by commit and wanted bytes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The key of a range has the id() of the object of its commit, and the wanted bytes. `SharedRange.subject` keeps
        # the object alive, so that the object of another commit cannot get the same id().
        self._ranges: dict[tuple[int, Hashable], SharedRange] = {}

    async def find(self, reader: StepReader, wanted: Hashable) -> SharedRange | None:
        """Add a lease to the range that has the wanted bytes, and return the range; None if no session leases it.

        If the range is being read for another session, this waits until the range has been read.
        """
        while (shared := self._ranges.get((id(reader.record), wanted))) is not None:
            if shared.arena_range is not None:
                shared.leases += 1
                return shared
            await shared.ended.wait()
        return None

    async def load(
        self, reader: StepReader, wanted: Hashable, nbytes: int, fill: Callable[[memoryview], Awaitable[None]]
    ) -> SharedRange:
        """Read the wanted bytes into a new range by `fill`, and return it with one lease.

        Call this at once after `find` has returned None.

        Raises:
            StorageError: see StepReaders.load.
        """
        shared = SharedRange((reader.record, wanted))
        key = (id(reader.record), wanted)
        self._ranges[key] = shared
        try:
            shared.arena_range = await self._engine.step_readers.load(reader.job, nbytes, fill)
        except BaseException:
            del self._ranges[key]
            raise
        finally:
            shared.ended.set()
        return shared

    def release(self, shared: SharedRange) -> None:
        """End one lease of a range. With the last one, the range is freed."""
        shared.leases -= 1
        if shared.leases:
            return
        record, wanted = shared.subject
        del self._ranges[id(record), wanted]
        assert shared.arena_range is not None
        self._engine.scratch.free(shared.arena_range)
