"""The client's name, job and step that are added to each log line which is written during a session's work.

This module owns nothing: structlog keeps these values with the present task, and with the tasks that it begins. It must
never give the id of a session to the log, because a process that has the id can act as the client. Log lines have the
client's name instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from structlog.contextvars import bind_contextvars, bound_contextvars

from paramserver.contract.printable import printable
from paramserver.sessions.session import Session


def note_in_logs(session: Session) -> None:
    """Add the session's client, job and step to all log lines of the present call."""
    bind_contextvars(**_words(session))


@contextmanager
def logged_for(session: Session) -> Iterator[None]:
    """Add the session's client, job and step to the log lines of a block that runs outside of its calls."""
    with bound_contextvars(**_words(session)):
        yield


def _words(session: Session) -> dict[str, str | int]:
    """Return the client's name and, if the session is a rank of a job, the job and the step under way.

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
