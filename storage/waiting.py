"""Waiting for work that cannot be cancelled, because it uses memory or extents until its end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
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
