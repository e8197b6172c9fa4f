"""Long loops on the event loop's thread, cut into slices between which the event loop runs its other tasks.

This module is the only helper for such loops. Other tasks may change state between two slices. A loop that must see or
change all of its state at once must not use this; its work has to be proportional to the changes instead.

All walks (loops over `in_slices`) on one event loop share its time: in one turn of the event loop they run for
SLICE_SECONDS together, however many clients have begun one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

# Long work in the event loop is cut into slices of this time, so that one turn of the loop is short. A call of another
# client takes several turns from its first byte to its answer. Health checks beside listings of a million shards (a
# large catalog in docs/measured-2026-11.md) took up to 0.06 s beside one listing and 0.22 s beside seven with slices of
# 0.005 s, and 0.04 s and 0.15 s with slices of this length.
SLICE_SECONDS = 0.001

ItemT = TypeVar("ItemT")


async def in_slices(items: Iterable[ItemT]) -> AsyncIterator[ItemT]:
    """Yield the items, and let the event loop run other tasks whenever the walks have used up their time."""
    turn = _Turn.of(asyncio.get_running_loop())
    for item in items:
        if turn.is_over():
            await turn.next()
        yield item


class _Turn:
    """The present turn of one event loop, and the walks that wait for a later turn, in order of arrival.

    A walk is a loop over `in_slices`. The walks of one turn together run for at most about SLICE_SECONDS.
    """

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._began: float | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Turn:
        turn = cls._of_loop.get(loop)
        if turn is None:
            turn = cls._of_loop[loop] = cls(loop)
        return turn

    def is_over(self) -> bool:
        """Return whether the walks have used up this turn's SLICE_SECONDS. The first walk that asks begins the turn."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
            self._call_soon(self._end)
        return now - self._began > SLICE_SECONDS

    async def next(self) -> None:
        """Wait until the walk that calls this may go on, which is in a later turn, and begin that turn."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine
        self._began = time.monotonic()

    def _end(self) -> None:
        """End the turn, and let the first waiting walk go on. The event loop calls this in its next iteration."""
        self._began = None
        while self._waiting:
            mine = self._waiting.popleft()
            if not mine.done():
                mine.set_result(None)
                # The task of the walk that may go on is in the event loop's queue already, so the walk runs before the
                # next `_end`, which ends its turn.
                self._began = time.monotonic()
                self._call_soon(self._end)
                return
