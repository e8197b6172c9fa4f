"""The job, the session, the rank and the step that each log record of this library carries, as attributes.

A program shows them with its formatter, for example `logging.Formatter("%(job)s %(step)s %(message)s")`, and formatters
that write JSON show them by themselves. Records have them that an engine's thread writes, or a thread that the engine
has started. This module owns nothing but the filter. It must never touch a handler or a logger that is not this
library's.
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
    """What the records of one engine carry.

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
        """Let the records of this thread carry this from now on, in place of what another engine has entered."""
        _current.set(self)


_NOTHING = LogContext()
_current: ContextVar[LogContext] = ContextVar("paramserver_log_context", default=_NOTHING)


def begin(job: str) -> LogContext:
    """Return what the records of a new engine carry, and let those of this thread carry it from now on.

    The loggers get their filter here. A filter on the logger of the package alone would not see the records of its
    modules' loggers.
    """
    begun = LogContext(job=job)
    begun.enter()
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and f"{name}.".startswith(f"{_PACKAGE}."):
            # A logger that has the filter already does not get it again.
            logger.addFilter(_carry)
    return begun


def carried(function: Callable[ArgumentsT, ResultT], step: int | None = None) -> Callable[ArgumentsT, ResultT]:
    """Return a function for another thread, whose records carry what those of this thread do.

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
    """Give a record its attributes, and let it pass. What is not known is "" or None."""
    words = _current.get()
    record.job, record.session, record.rank, record.step = words.job, words.session, words.rank, words.step
    return True
