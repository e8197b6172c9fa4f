"""The one place where errors become gRPC status codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from paramserver.errors import UnavailableError
from paramserver.security.gate import RefusalLog, RefusedError
from paramserver.transfers import TransferStalledError
from paramserver.v1.printable import printable
from storage import errors

log = logging.getLogger(__name__)

T = TypeVar("T")
_refusals = RefusalLog()

# A status travels in HTTP headers, which clients limit to 8 KiB; a character may take twelve bytes there. A name in a
# text is as long as the client has made it.
MAX_TEXT = 600

_CODES: tuple[tuple[type[errors.StorageError], grpc.StatusCode], ...] = (
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BudgetExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StepAbortedError, grpc.StatusCode.ABORTED),
    (errors.DataLossError, grpc.StatusCode.DATA_LOSS),
    (TransferStalledError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.DeviceError, grpc.StatusCode.UNAVAILABLE),
)


def status_code(error: errors.StorageError) -> grpc.StatusCode:
    """The status code for an error of the engine."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def answer(context: grpc.aio.ServicerContext[Any, Any], error: errors.StorageError) -> NoReturn:
    """Ends the call with the status of an error, when the client has it, or is gone."""
    await _abort(context, status_code(error), str(error))


@asynccontextmanager
async def answering_errors(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the call with the status of what the block raises; what is not one of ours is logged, and INTERNAL."""
    try:
        yield
    except errors.StorageError as error:
        await answer(context, error)
    except RefusedError as error:
        _refusals.note(context, error)
        await _abort(context, error.code, error.text)
    except (grpc.aio.AbortError, GeneratorExit):
        raise
    except grpc.aio.InternalError as error:
        raise _call_is_over() from error
    except Exception as error:
        log.exception("a request failed in an unforeseen way")
        text = f"internal error ({type(error).__name__}); see the daemon's log"
        await _abort(context, grpc.StatusCode.INTERNAL, text)


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that must not be left half done: it goes on when its client goes.

    Raises what it raises. Of that nobody is told once the client has gone: asyncio would put it into the log.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, text: str) -> NoReturn:
    text = printable(text)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}..."
    try:
        await context.abort(code, text)
    except grpc.aio.InternalError as error:
        raise _call_is_over() from error


def _call_is_over() -> asyncio.CancelledError:
    """gRPC could not send: the client has gone. Cancellation is what ends a method then without a stack in the log."""
    return asyncio.CancelledError("the client has gone")
