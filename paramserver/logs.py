"""Structured logs on stderr: one line per event, for people or as JSON."""

from __future__ import annotations

import logging
import sys

import grpc.aio
import structlog

_GRPC = "grpc._cython.cygrpc"


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
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
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
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger(_GRPC).addFilter(_is_no_gone_client)


def _is_no_gone_client(record: logging.LogRecord) -> bool:
    """gRPC logs a stack for each client that goes while it is answered: nothing that an operator could act upon."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))
