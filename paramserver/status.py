"""The one place where errors become gRPC status codes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from paramserver.security import RefusalLog, RefusedError
from paramserver.transfers import TransferStalledError
from storage import errors

log = logging.getLogger(__name__)
_refusals = RefusalLog()

_CODES: tuple[tuple[type[errors.StorageError], grpc.StatusCode], ...] = (
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BudgetExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StepAbortedError, grpc.StatusCode.ABORTED),
    (errors.DataLossError, grpc.StatusCode.DATA_LOSS),
    (TransferStalledError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.DeviceError, grpc.StatusCode.UNAVAILABLE),
)


def status_code(error: errors.StorageError) -> grpc.StatusCode:
    """The status code for an error of the engine."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


@asynccontextmanager
async def answering_errors(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the call with the status of what the block raises; what is not one of ours is logged, and INTERNAL."""
    try:
        yield
    except errors.StorageError as error:
        await context.abort(status_code(error), str(error))
    except RefusedError as error:
        _refusals.note(context, error)
        await context.abort(error.code, error.text)
    except (grpc.aio.AbortError, GeneratorExit):
        raise
    except Exception as error:
        log.exception("a request failed in an unforeseen way")
        await context.abort(grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__}); see the daemon's log")
