"""Who is next where one at a time may go on: the one with the lowest position, then the one that came first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock whose waiters are served by position."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def at(self, position: float) -> AsyncIterator[None]:
        """Waits for the turn, and has it within the context."""
        if self._taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (position, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """To the next one; it stays taken meanwhile, for nobody to come in between."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False
