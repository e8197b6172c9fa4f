"""The job, the session, the rank and the step that each log record of this library carries, as attributes.

A program shows these attributes with its formatter, for example `logging.Formatter("%(job)s %(step)s %(message)s")`,
and formatters that write JSON show them by themselves. A record has the attributes of an engine if it is written by the
thread that made the engine, or by a thread that the engine has started. This module owns nothing but the filter. It
must never touch a handler or a logger that is not this library's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

ArgumentsT = ParamSpec("ArgumentsT")
ResultT = TypeVar("ResultT")

_PACKAGE = __name__.partition(".")[0]


@dataclass(slots=True)
class LogContext:
    """The attributes that the log records of one engine carry.

    Attributes:
        job: name of the job.
        session: the name of this client, under which the daemon's log and `paramserver-admin sessions` have it; ""
            before there is a session.
        rank: number of this rank.
        step: the step under way; None before the first one.
    """

    job: str = ""
    session: str = ""
    rank: int | None = None
    step: int | None = None

    def enter(self) -> None:
        """Let log records of this thread carry these attributes from now on, in place of those of another engine."""
        _current.set(self)


_NOTHING = LogContext()
_current: ContextVar[LogContext] = ContextVar("paramserver_log_context", default=_NOTHING)


def begin(job: str) -> LogContext:
    """Return the attributes for log records of a new engine, which records of this thread carry from now on.

    The library's loggers get their filter here, each for itself: a filter on the package's logger alone would not see
    the records of the modules' loggers.
    """
    begun = LogContext(job=job)
    begun.enter()
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and f"{name}.".startswith(f"{_PACKAGE}."):
            # All loggers of the library are given the filter, because `addFilter` does nothing if the logger has this
            # filter already.
            logger.addFilter(_carry)
    return begun


def carried(function: Callable[ArgumentsT, ResultT], step: int | None = None) -> Callable[ArgumentsT, ResultT]:
    """Return a function for another thread, in which log records carry the attributes of this thread's records.

    The returned function must not be called again before it has returned.

    Args:
        function: is called with the arguments of the returned function.
        step: the step that the records are about; None: the one under way when they are written.
    """
    context = copy_context()
    if step is not None:
        context.run(replace(_current.get(), step=step).enter)
    return lambda *args, **kwargs: context.run(function, *args, **kwargs)


def _carry(record: logging.LogRecord) -> bool:
    """Set the attributes of a log record, and return True, because this filter of logging drops no record.

    An attribute that is not known is "" or None.
    """
    words = _current.get()
    record.job, record.session, record.rank, record.step = words.job, words.session, words.rank, words.step
    return True
