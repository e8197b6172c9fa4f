"""Long walks on the event loop, cut into slices: the loop serves everybody else between two of them.

The one helper for this. State may change between two slices: a walk that must see or change all of it at once is not
for this, and has to be made proportional to what has changed.

All walks of a loop share its time: in one turn of the loop they have SLICE_SECONDS together, however many clients have
begun one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

# A twentieth of the stall that the daemon's loop watch reports.
SLICE_SECONDS = 0.005

ItemT = TypeVar("ItemT")


async def in_slices(items: Iterable[ItemT]) -> AsyncIterator[ItemT]:
    """Yield the items, and let the event loop go on whenever the walks of this turn have had their time."""
    turn = _Turn.of(asyncio.get_running_loop())
    for item in items:
        if turn.is_over():
            await turn.next()
        yield item


class _Turn:
    """The present turn of one event loop, and the walks that wait for a later one, in the order in which they came."""

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
        """Whether the walks of this turn have had their time; the first one that asks begins it."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
            self._call_soon(self._end)
        return now - self._began > SLICE_SECONDS

    async def next(self) -> None:
        """Wait for a later turn, which is then the caller's to begin."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine
        self._began = time.monotonic()

    def _end(self) -> None:
        """End the turn: the loop calls this in its next one. Only one of the walks that wait goes on."""
        self._began = None
        while self._waiting:
            mine = self._waiting.popleft()
            if not mine.done():
                mine.set_result(None)
                # After the walk, which is next in the loop's queue.
                self._began = time.monotonic()
                self._call_soon(self._end)
                return
