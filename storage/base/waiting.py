"""Waiting: for work that cannot be cancelled, because it uses memory or extents until its end, and until a deadline.

No deadline of this module passes because the event loop itself stood still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

FutureT = TypeVar("FutureT", bound=asyncio.Future[Any])

# If a timer of the event loop fires later than this, the loop stood still: the process was stopped, had no CPU, or had
# its memory on a disk.
LATE_SECONDS = 1.0


class Alarm:
    """A call at a time of the event loop, which does not count time in which the loop stood still.

    If the loop comes to it late, what would make it needless may have happened meanwhile without the loop's knowledge.
    So it is put off once more by the time by which it is late.

    Args:
        at: the time of the event loop.
        act: the function to call.
    """

    def __init__(self, at: float, act: Callable[[], None]) -> None:
        self._act = act
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_at(at, self._ring, at)

    def cancel(self) -> None:
        """Do not call the function any more; idempotent."""
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
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def finish_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for all tasks, also when one fails or the caller is cancelled, because they use their buffers until then."""
    pending = list(tasks)
    if not pending:
        return
    try:
        # If the caller is cancelled, no task waits for the gathering future any more, and a task may fail after that.
        await asyncio.shield(unlogged(asyncio.gather(*pending)))
    except BaseException:
        try:
            await wait_out(pending)
        finally:
            for task in pending:
                if not task.cancelled():
                    task.exception()
        raise
