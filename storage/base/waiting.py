"""Functions that wait: for work that cannot be cancelled, because it uses memory or extents, and until a deadline.

Time in which the event loop itself stood still does not count towards a deadline of this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

FutureT = TypeVar("FutureT", bound=asyncio.Future[Any])

# If a timer of the event loop fires late by more than this many seconds, the event loop stood still: the process was
# stopped, had no CPU, or its memory was swapped out.
LATE_SECONDS = 1.0


class Alarm:
    """A timer: it calls a function at a time of the event loop, and does not count time in which the loop stood still.

    If the loop runs the alarm late, an event that cancels the alarm, such as an answer on a socket, may have happened
    without the loop having seen it. So the alarm is put off by the time by which it is late.

    Args:
        at: the time, on the event loop's clock, at which the function is called.
        act: the function to call.
    """

    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self._act = act
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_at(at, self._ring, at)

    def cancel(self) -> None:
        """Keep the alarm from calling the function; a repeated call has no effect."""
        self._handle.cancel()

    def _ring(self, due: float) -> None:
        now = self._loop.time()
        if now - due > LATE_SECONDS:
            again = now + (now - due)
            self._handle = self._loop.call_at(again, self._ring, again)
        else:
            self._act()


async def wait_out(futures: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all futures are done, even if the caller is cancelled meanwhile. The futures are not cancelled.

    A call may be cancelled more than once: first shortly before its deadline, so that the answer arrives in time, and
    again because its client has disconnected.

    Raises:
        asyncio.CancelledError: the caller was cancelled. This is raised only after all futures are done.
    """
    cancellation: asyncio.CancelledError | None = None
    while not all(future.done() for future in futures):
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation


def unlogged(future: FutureT) -> FutureT:
    """Keep asyncio from logging a failure of the future that no task waits for, and return the future.

    A task that does wait for the future still gets its exception.
    """
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def first_of(*events: asyncio.Event) -> None:
    """Wait until at least one of the events is set, and stop waiting for the others."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def finish_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for all tasks, also if one fails or the caller is cancelled: a task uses its buffers until it ends."""
    pending = list(tasks)
    if not pending:
        return
    try:
        # If the caller is cancelled, no task waits for the future of `asyncio.gather` any more. `unlogged` keeps
        # asyncio from logging an error that one of the gathered tasks raises after that.
        await asyncio.shield(unlogged(asyncio.gather(*pending)))
    except BaseException:
        try:
            await wait_out(pending)
        finally:
            for task in pending:
                if not task.cancelled():
                    task.exception()
        raise
