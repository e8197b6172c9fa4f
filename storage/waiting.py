"""Waiting for what cannot be taken back: the memory or the extents that it works on are in use until its end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any


async def wait_out(futures: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all futures are done, however often the caller is cancelled meanwhile; they are not cancelled.

    A call can be cancelled twice: once shortly before its deadline, for the answer to come in time, and once because
    its client goes.

    Raises:
        asyncio.CancelledError: at the end, if the caller was cancelled.
    """
    cancellation: asyncio.CancelledError | None = None
    while not all(future.done() for future in futures):
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation


async def settle(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for all tasks, also when one fails or the caller is cancelled, because they use their buffers until then."""
    pending = list(tasks)
    if not pending:
        return
    try:
        await asyncio.shield(asyncio.gather(*pending))
    except BaseException:
        try:
            await wait_out(pending)
        finally:
            for task in pending:
                if not task.cancelled():
                    task.exception()
        raise
