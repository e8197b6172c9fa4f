"""The words of a session that each log line gets which is written while the session's work is done.

Owns nothing: structlog keeps them with the present task, and with the tasks that it begins. Must never give the id of a
session to the log, because it lets its holder act as the client; a session is named by its client's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from structlog.contextvars import bind_contextvars, bound_contextvars

from paramserver.contract.printable import printable
from paramserver.sessions.session import Session


def note_in_logs(session: Session) -> None:
    """Give the words of a session to all log lines of the present call."""
    bind_contextvars(**_words(session))


@contextmanager
def logged_for(session: Session) -> Iterator[None]:
    """Give the words of a session to the log lines of the block, which no call of the session has begun."""
    with bound_contextvars(**_words(session)):
        yield


def _words(session: Session) -> dict[str, str | int]:
    """Return the client's name, and if the session is a rank of a job the job and the step under way.

    Control characters in them are escaped, because clients choose the names.
    """
    words: dict[str, str | int] = {"session": printable(session.client)}
    if (run := session.run) is None:
        return words
    words["job"] = printable(run.spec.name)
    if run.job.done() and not run.job.cancelled() and run.job.exception() is None:
        pending = run.job.result().pending
        if pending is not None:
            words["step"] = pending.step
    return words
