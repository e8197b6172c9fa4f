"""A lock that goes to the waiter with the lowest position, and among equal positions to the one that came first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

GiveWay = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
_Place = tuple[float, int]


class PositionLock:
    """A lock of asyncio tasks. When it becomes free, the waiting task with the lowest position gets it."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[tuple[_Place, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def at(self, position: float) -> AsyncIterator[GiveWay]:
        """Hold the lock within the context. Waiters with a lower position get it first.

        The context yields a function `give_way(meanwhile)`. If tasks with a lower position wait, it passes the lock to
        them, awaits `meanwhile()`, and returns when this task holds the lock again. If none waits, it returns at once:

            async with lock.at(position=7) as give_way:
                for tile in tiles:
                    await work_on(tile)
                    await give_way(free_buffers)
        """
        place, has_turn = (position, next(self._arrivals)), False

        async def give_way(meanwhile: Callable[[], Awaitable[None]]) -> None:
            nonlocal has_turn
            if self._waiting and self._waiting[0][0] < place:
                has_turn = False
                turn = self._queue(place)
                self._pass_on()
                await self._wait(turn, meanwhile)
                has_turn = True

        turn = self._queue(place)
        if not self._taken:
            # The free lock is passed on in the next turn of the event loop and not at once, because one event often
            # wakes several tasks, and the first task to ask need not have the lowest position.
            self._taken = True
            asyncio.get_running_loop().call_soon(self._pass_on)
        await self._wait(turn)
        has_turn = True
        try:
            yield give_way
        finally:
            if has_turn:
                self._pass_on()

    def _queue(self, place: _Place) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (place, turn))
        return turn

    async def _wait(self, turn: asyncio.Future[None], meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        try:
            if meanwhile is not None:
                await meanwhile()
            await turn
        except BaseException:
            if not turn.cancel() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Pass the lock to the next waiter. The lock stays taken meanwhile, so that no new task can get it."""
        while self._waiting:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False
