"""Structured logs on stderr: one line per event, for people or as JSON.

Owns how a name that a client chose is written there: escaped, so that no client can write lines of its own.
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
    """Text of several lines that this program has made itself, as a stack: a log shows it as it is."""

    __slots__ = ()


def configure_logging(level: str, log_format: str) -> None:
    """Routes structlog and the standard library's loggers through the same format.

    Tracebacks come without local variables, which structlog would add: they hold session ids and tokens.
    """
    shared: list[structlog.typing.Processor] = [
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
    """gRPC logs a stack for each client that goes while it is answered: nothing that an operator could act upon."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def _escape_arguments(record: logging.LogRecord) -> bool:
    """Escape what a record's format string will show. The format itself is this program's; its arguments may quote a
    client, for example in an exception."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escape, record.args))
    elif record.args:
        record.args = {key: _escape(value) for key, value in record.args.items()}
    return True


def _escape(argument: object) -> object:
    return argument if isinstance(argument, int | float | OwnText) else printable(argument)


def _write_traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """Write a traceback whose lines hold nothing that a terminal acts upon: the exception may quote a client."""
    frames = io.StringIO()
    structlog.dev.plain_traceback(frames, exc_info)
    stream.write("\n".join(map(printable, frames.getvalue().split("\n"))))
