"""Waiting for what cannot be taken back: the memory or the extents that it works on are in use until its end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, TypeVar

FutureT = TypeVar("FutureT", bound=asyncio.Future[Any])


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


def unlogged(future: FutureT) -> FutureT:
    """Keep asyncio from logging the future's failure where no task is left that waits for the future.

    A task that does wait raises the failure as ever. Returns the future.
    """
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
