"""The answers to errors: which gRPC status and text a client gets for each, and which errors are logged.

This module owns the table of status codes, and the log of refusals. It must never send a client the text of an
unforeseen error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from paramserver.contract.answered import ANSWERED, DEVICE, OTHER_MODEL, with_epoch
from paramserver.contract.printable import printable
from paramserver.errors import (
    LateError,
    StaleCallError,
    TransferStalledError,
    UnavailableError,
    UnknownSessionError,
)
from paramserver.security.gate import Context, RefusalLog, RefusedError
from storage.base import errors
from storage.base.waiting import Alarm, unlogged

log = logging.getLogger(__name__)

T = TypeVar("T")
_refusals = RefusalLog()

# The most characters of a status's text. A text may quote a name that a client chose, and such a name can be long. A
# status travels in HTTP headers, which clients limit to 8 KiB, and a character may take twelve bytes of a header.
MAX_TEXT = 600

# The daemon answers a call this long before the client's deadline: ANSWER_SECONDS, or ANSWER_SHARE of the time that the
# client allows if that is shorter.
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
    (StaleCallError, grpc.StatusCode.UNAVAILABLE),
    # A device that does not answer may answer later, so DeviceStuckError gets UNAVAILABLE, and clients repeat the call.
    # A device that refused an operation will refuse the next one, so DeviceError gets INTERNAL, and clients do not
    # repeat the call until their deadline.
    (errors.DeviceStuckError, grpc.StatusCode.UNAVAILABLE),
    (errors.DeviceError, grpc.StatusCode.INTERNAL),
)


def status_code(error: errors.StorageError) -> grpc.StatusCode:
    """Return the status code for an error of the engine or the daemon."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def answer(context: Context, error: errors.StorageError) -> NoReturn:
    """End the call with the status of an error.

    It never returns, because it raises once the status is sent or the client is gone.
    """
    await _abort(context, status_code(error), str(error), _marks_of(error))


def _marks_of(error: errors.StorageError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that tell the client what the status code does not; see contract/answered.py."""
    match error:
        case errors.OtherModelError():
            return OTHER_MODEL
        case errors.DeviceError() if not isinstance(error, errors.DeviceStuckError):
            return DEVICE
        case UnknownSessionError():
            return with_epoch(error.epoch)
        case StaleCallError():
            return ()
        case _:
            return ANSWERED if status_code(error) is grpc.StatusCode.UNAVAILABLE else ()


@asynccontextmanager
async def answering_errors(context: Context, method: str) -> AsyncIterator[None]:
    """End the call with the status of the error that the block raises.

    An error of a class that neither the engine nor the daemon raises on purpose is logged with its stack, and the
    client gets INTERNAL.

    Args:
        context: gRPC's context of the call.
        method: the RPC's name, for the log of refusals.
    """
    try:
        yield
    except errors.StorageError as error:
        await answer(context, error)
    except RefusedError as error:
        _refusals.note(context, method, error)
        await _abort(context, error.code, error.text)
    except grpc.aio.AbortError as error:
        _drop_traceback_at_end(error)
        raise
    except GeneratorExit:
        raise
    except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
        # gRPC raises UsageError if the method was aborting its call when `answering_in_time` cancelled the method. Only
        # methods of the health service, which a library defines, abort calls themselves; tests/faults/fuzz.py found it.
        raise _call_is_over() from error
    except Exception as error:
        log.exception("a request failed in an unforeseen way")
        text = f"internal error ({type(error).__name__}); see the daemon's log"
        await _abort(context, grpc.StatusCode.INTERNAL, text)


@asynccontextmanager
async def answering_in_time(context: Context, describe_waits: Callable[[], str]) -> AsyncIterator[None]:
    """Cancel the block shortly before the client's deadline, so that the client still learns why it waited.

    The block is cancelled in the same way as gRPC cancels it at the deadline itself, or when the client goes.

    Raises:
        LateError: the block was cancelled; the text contains what `describe_waits` returned shortly before.
    """
    allowed = context.time_remaining()
    if allowed is None:
        yield
        return
    loop, waits = asyncio.get_running_loop(), ""

    def end() -> None:
        # `describe_waits` says what the call waits for, which the client reads in the error. It is called before the
        # call's work is cancelled, because the work waits for nothing after that.
        nonlocal waits
        waits = describe_waits()
        limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            alarm = Alarm(loop.time() + allowed - min(ANSWER_SECONDS, allowed * ANSWER_SHARE), end)
            try:
                yield
            finally:
                alarm.cancel()
    except TimeoutError:
        raise LateError(f"not done within the {allowed:.3g} s that the client allows: {waits}") from None


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be left half done: if the caller is cancelled, the work goes on.

    Returns what the work returns, and raises what it raises. A failure after the client has gone is not logged.
    """
    return await asyncio.shield(unlogged(asyncio.ensure_future(work)))


async def _abort(
    context: Context, code: grpc.StatusCode, text: str, marks: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    text = printable(text)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}..."
    try:
        await context.abort(code, text, trailing_metadata=marks)
    except grpc.aio.AbortError as error:
        _drop_traceback_at_end(error)
        raise
    except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
        # gRPC raises UsageError if the method was aborting its call when `answering_in_time` cancelled the method. Only
        # methods of the health service, which a library defines, abort calls themselves; tests/faults/fuzz.py found it.
        raise _call_is_over() from error


def _drop_traceback_at_end(error: grpc.aio.AbortError) -> None:
    """Drop the tracebacks of an error of gRPC, and of the errors that led to it, when the current call ends.

    gRPC keeps the error in the state of the call, and the frames of its traceback keep the call. These reference cycles
    would stay in memory until a collection of the oldest generation, which is rare; see
    storage/base/tune_interpreter.py.
    """

    def forget(_: asyncio.Task[Any]) -> None:
        link: BaseException | None = error
        while link is not None:
            following = link.__context__
            link.__traceback__ = link.__context__ = None
            link = following

    if (task := asyncio.current_task()) is not None:
        task.add_done_callback(forget)


def _call_is_over() -> asyncio.CancelledError:
    """Return the error that ends a method whose status gRPC could not send, because the client has gone.

    The error is a CancelledError, because gRPC logs the stack of any other error that a method raises.
    """
    return asyncio.CancelledError("the client has gone")
