"""The one place where errors become gRPC status codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from paramserver.contract.answered import ANSWERED
from paramserver.contract.printable import printable
from paramserver.errors import LateError, TransferStalledError, UnavailableError
from paramserver.security.gate import Context, RefusalLog, RefusedError
from storage import errors
from storage.waiting import unlogged

log = logging.getLogger(__name__)

T = TypeVar("T")
_refusals = RefusalLog()

# A status travels in HTTP headers, which clients limit to 8 KiB; a character may take twelve bytes there. A name in a
# text is as long as the client has made it.
MAX_TEXT = 600

# How long before a client's deadline the daemon answers: at most so many seconds, and so much of the time allowed.
ANSWER_SECONDS = 1.0
ANSWER_SHARE = 0.1

_CODES: tuple[tuple[type[errors.StorageError], grpc.StatusCode], ...] = (
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BudgetExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StepAbortedError, grpc.StatusCode.ABORTED),
    (errors.DataLossError, grpc.StatusCode.DATA_LOSS),
    (TransferStalledError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (LateError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.DeviceError, grpc.StatusCode.UNAVAILABLE),
)


def status_code(error: errors.StorageError) -> grpc.StatusCode:
    """The status code for an error of the engine."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def answer(context: Context, error: errors.StorageError) -> NoReturn:
    """Ends the call with the status of an error, when the client has it, or is gone."""
    await _abort(context, status_code(error), str(error))


@asynccontextmanager
async def answering_errors(context: Context, method: str) -> AsyncIterator[None]:
    """Ends the call with the status of what the block raises; what is not one of ours is logged, and INTERNAL.

    Args:
        context: the call's.
        method: the RPC's name, for the log.
    """
    try:
        yield
    except errors.StorageError as error:
        await answer(context, error)
    except RefusedError as error:
        _refusals.note(context, method, error)
        await _abort(context, error.code, error.text)
    except (grpc.aio.AbortError, GeneratorExit):
        raise
    except grpc.aio.InternalError as error:
        raise _call_is_over() from error
    except Exception as error:
        log.exception("a request failed in an unforeseen way")
        text = f"internal error ({type(error).__name__}); see the daemon's log"
        await _abort(context, grpc.StatusCode.INTERNAL, text)


@asynccontextmanager
async def answering_in_time(context: Context, describe_waits: Callable[[], str]) -> AsyncIterator[None]:
    """End what the block waits for shortly before the client's deadline, so that the client learns why it waited.

    The block is cancelled as it would be at the deadline itself, or when the client goes.

    Raises:
        LateError: with what `describe_waits` says of the daemon then.
    """
    allowed = context.time_remaining()
    if allowed is None:
        yield
        return
    loop, waits = asyncio.get_running_loop(), ""

    def end() -> None:
        # Before the block is cancelled: afterwards it waits for nothing any more.
        nonlocal waits
        waits = describe_waits()
        limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            alarm = loop.call_later(allowed - min(ANSWER_SECONDS, allowed * ANSWER_SHARE), end)
            try:
                yield
            finally:
                alarm.cancel()
    except TimeoutError:
        raise LateError(f"not done within the {allowed:.3g} s that the client allows: {waits}") from None


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that must not be left half done: it goes on when its client goes.

    Raises what it raises. Of that nobody is told once the client has gone: asyncio would put it into the log.
    """
    return await asyncio.shield(unlogged(asyncio.ensure_future(work)))


async def _abort(context: Context, code: grpc.StatusCode, text: str) -> NoReturn:
    text = printable(text)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}..."
    try:
        await context.abort(code, text, trailing_metadata=ANSWERED if code is grpc.StatusCode.UNAVAILABLE else ())
    except grpc.aio.InternalError as error:
        raise _call_is_over() from error


def _call_is_over() -> asyncio.CancelledError:
    """gRPC could not send: the client has gone. Cancellation is what ends a method then without a stack in the log."""
    return asyncio.CancelledError("the client has gone")
