"""A loop for work that the daemon repeats. A failure must not end the loop, because no caller would notice the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

log = logging.getLogger(__name__)


async def repeat(what: str, seconds: float, work: Callable[[], Awaitable[None]]) -> NoReturn:
    """Run `work` again and again, `seconds` after each end, until the task is cancelled; log what it raises.

    `what` names the work in the log.
    """
    failure = ""
    while True:
        try:
            await work()
            failure = ""
        except Exception as error:
            # The same failure is logged once, however often it is repeated. An OSError needs no stack.
            if failure != (failure := repr(error)):
                stack = None if isinstance(error, OSError) else error
                log.error("%s failed: %s; it is tried again every %g s", what, error, seconds, exc_info=stack)
        await asyncio.sleep(seconds)
