"""Structured logs on stderr: one line per event, for people or as JSON.

This module owns the escaping of text that clients chose, so that no client can forge log lines.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import TextIO

import grpc.aio
import structlog

from paramserver.contract.printable import printable

_GRPC = "grpc._cython.cygrpc"


class OwnText(str):
    """Text that this program made itself, for example a stack of several lines. The log does not escape it."""

    __slots__ = ()


def configure_logging(level: str, log_format: str) -> None:
    """Route structlog's and the standard library's loggers through the same format on stderr.

    Tracebacks show no local variables, which structlog would add, because these hold session ids and tokens.
    """
    shared: list[structlog.typing.Processor] = [
        # This processor adds the session, job and step for which a line is written to the line; see
        # sessions/log_context.py.
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: structlog.typing.Processor
    if log_format == "json":
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        shared.append(structlog.processors.ExceptionRenderer(frames))
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    handler.addFilter(_escape_arguments)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger(_GRPC).addFilter(_is_no_gone_client)


def _is_no_gone_client(record: logging.LogRecord) -> bool:
    """Return whether a log record is kept: all but the stack that gRPC logs when a client leaves.

    Operators cannot act on that stack.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def _escape_arguments(record: logging.LogRecord) -> bool:
    """Escape the arguments of a record, because they may contain text of a client; the format string does not.

    Return True, which lets the record pass.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escape, record.args))
    elif record.args:
        record.args = {key: _escape(value) for key, value in record.args.items()}
    return True


def _escape(argument: object) -> object:
    return argument if isinstance(argument, int | float | OwnText) else printable(argument)


def _write_traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """Write a traceback with control characters escaped, because the exception's text may contain text of a client."""
    frames = io.StringIO()
    structlog.dev.plain_traceback(frames, exc_info)
    stream.write("\n".join(map(printable, frames.getvalue().split("\n"))))
