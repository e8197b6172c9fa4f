"""Worker threads that do blocking I/O for the event loop: one pool for reads, one for writes, each by priority.

A request completes on its own; nothing here waits for unrelated requests.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


class Priority(enum.IntEnum):
    """Who goes first, lowest value first."""

    DEMAND = 0
    PREFETCH = 1
    UPDATE = 2


@dataclass(order=True, slots=True)
class _Request:
    priority: int
    sequence: int
    work: Callable[[], None] = field(compare=False)
    done: asyncio.Future[None] = field(compare=False)


class IoPool:
    """A fixed number of threads that run requests in the order of their priority."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: queue.PriorityQueue[_Request | _Stop] = queue.PriorityQueue()
        self._sequence = itertools.count()
        self._loop = asyncio.get_running_loop()
        self.depth = 0
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[], None], priority: Priority) -> None:
        """Runs `work` on a thread and raises what it raises.

        A cancelled wait ends only when the work has: the thread may be using the caller's buffer until then.
        """
        request = _Request(int(priority), next(self._sequence), work, self._loop.create_future())
        self.depth += 1
        self._queue.put(request)
        try:
            await asyncio.shield(request.done)
        except asyncio.CancelledError:
            if not request.done.done():
                await asyncio.wait([request.done])
            request.done.exception()
            raise

    async def close(self) -> None:
        """Ends the threads once all requests are done."""
        for _ in self._threads:
            self._queue.put(_Stop())
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        while not isinstance(request := self._queue.get(), _Stop):
            error: BaseException | None = None
            try:
                request.work()
            except BaseException as raised:
                error = raised
            self._loop.call_soon_threadsafe(self._finish, request, error)

    def _finish(self, request: _Request, error: BaseException | None) -> None:
        self.depth -= 1
        if error is None:
            request.done.set_result(None)
        else:
            request.done.set_exception(error)


@dataclass(order=True, slots=True)
class _Stop:
    priority: int = 99
    sequence: int = 0
