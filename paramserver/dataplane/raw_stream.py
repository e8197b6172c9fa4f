"""Functions for Read, Write and AccessLoan: send one message, receive one, run a transfer that can be ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from paramserver.dataplane.chunk_budget import Transfer

RawContext = grpc.aio.ServicerContext[bytes, bytes]


async def write_message(context: RawContext, message: bytes | Message) -> None:
    """Send a message, and wait until gRPC has taken it."""
    try:
        await context.write(message if isinstance(message, bytes) else message.SerializeToString())
    except grpc.aio.InternalError as gone:
        # The write failed because the client has gone. gRPC is about to cancel this call, and raising CancelledError
        # here ends the call in the same way.
        raise asyncio.CancelledError from gone


async def next_message(context: RawContext) -> bytes | None:
    """Return the client's next message, or None if the client has closed its side."""
    message = await context.read()
    return message if isinstance(message, bytes) else None


async def run_transfer(
    transfer: Transfer, work: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None] | None = None
) -> None:
    """Run `work` to its end, with `beside` running at the same time.

    Raises:
        Exception: `work` or `beside` raised it, or `transfer.ended` got it. Both are cancelled then.
    """
    main = asyncio.ensure_future(work)
    tasks = [main] if beside is None else [main, asyncio.ensure_future(beside)]
    waiting: set[asyncio.Future[None]] = {*tasks, transfer.ended}
    try:
        while not main.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
