"""Work that the daemon repeats as long as it lives: a failure must not end it, for nothing would show that it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

log = logging.getLogger(__name__)


async def repeat(what: str, seconds: float, work: Callable[[], Awaitable[None]]) -> NoReturn:
    """Do the work, then again that many seconds after each end, until the task is cancelled; log what it raises."""
    failure = ""
    while True:
        try:
            await work()
            failure = ""
        except Exception as error:
            # A failure that lasts is one line, not one each time; the system's own need no stack.
            if failure != (failure := repr(error)):
                stack = None if isinstance(error, OSError) else error
                log.error("%s failed: %s; it is tried again every %g s", what, error, seconds, exc_info=stack)
        await asyncio.sleep(seconds)
