"""Waiting for work that cannot be cancelled, because it uses memory or extents until its end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, TypeVar

FutureT = TypeVar("FutureT", bound=asyncio.Future[Any])


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
    """Keep asyncio from logging the future's failure where no task is left that waits for the future.

    A task that does wait raises the failure as ever. Returns the future.
    """
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
