"""Work beside the calls of clients: work that the daemon repeats, and work that another thread gives to the event loop.

A failure must not end work that is repeated, because no caller would notice the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from storage.base.errors import StorageError

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
# The most seconds that a thread waits for the event loop to answer. A loop that is not blocked answers much sooner.
ANSWER_SECONDS = 5.0


async def repeat(what: str, seconds: float, work: Callable[[], Awaitable[None]]) -> NoReturn:
    """Run `work` again and again, `seconds` after each end, until the task is cancelled. Log the errors that it raises.

    `what` names the work in the log.
    """
    failure = ""
    while True:
        try:
            await work()
            failure = ""
        except Exception as error:
            # A failure is logged only if it differs from the one before, so that a failure which is repeated is logged
            # once.
            if failure != (failure := repr(error)):
                stack = unforeseen(error)
                log.error("%s failed: %s; it is tried again every %g s", what, error, seconds, exc_info=stack)
        await asyncio.sleep(seconds)


def unforeseen(error: BaseException) -> BaseException | None:
    """Return the error if the log needs its stack; None if its text says all, as that of an I/O error does."""
    return None if isinstance(error, OSError | StorageError) else error


def run_on_loop(work: Coroutine[Any, Any, ResultT], loop: asyncio.AbstractEventLoop) -> ResultT:
    """Run `work` on an event loop and return its result. Do not call this on the loop's own thread.

    Raises:
        TimeoutError: the event loop did not answer within ANSWER_SECONDS.
    """
    running = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return running.result(ANSWER_SECONDS)
    finally:
        running.cancel()
