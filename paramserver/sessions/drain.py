"""The draining of a daemon: it accepts no new session, and says for which sessions a stop has to wait.

This module owns the beginning of the draining. It must never end a session: trainers go on until they end by
themselves, or until the operator stops the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paramserver.errors import UnavailableError
from paramserver.sessions.session import Session
from paramserver.sessions.sessions import Sessions
from storage.engine import Engine
from storage.state.versions import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A session for which a stop waits, and the reason as a text for people."""

    session: Session
    why: str


class Drain:
    """The state of one daemon's draining: while it is on, the daemon refuses new sessions."""

    def __init__(self, engine: Engine, sessions: Sessions) -> None:
        """Make the state of a daemon that is not being drained."""
        self._engine = engine
        self._sessions = sessions
        # The time at which the draining began, in seconds since 1970; None if the daemon is not being drained.
        self.since: float | None = None
        # The newest committed step of each job when the draining began.
        self._committed: Mapping[str, int | None] = {}

    @property
    def is_on(self) -> bool:
        """Whether the daemon is being drained."""
        return self.since is not None

    def begin(self) -> None:
        """Refuse new sessions from now on. A repeated call has no effect."""
        if self.since is None:
            self.since = time.time()
            self._committed = {name: job.newest for name, job in self._engine.jobs.by_name.items()}

    def end(self) -> None:
        """Accept new sessions again. A repeated call has no effect."""
        self.since, self._committed = None, {}

    def check_open(self) -> None:
        """Raise UnavailableError if no new session is accepted."""
        if self.is_on:
            raise UnavailableError(
                "the store daemon is being drained and accepts no new session; connect again when it has been started "
                "anew, or after `paramserver-admin undrain`"
            )

    def waiting(self) -> Sequence[Waiting]:
        """Return the sessions whose work would be lost or interrupted if the daemon stopped now."""
        reasons = ((session, self._reason(session)) for session in self._sessions)
        return [Waiting(session=session, why=why) for session, why in reasons if why]

    def _reason(self, session: Session) -> str:
        """Return the reason why a stop waits for a session; "" if it does not have to wait."""
        if session.readers:
            return f"it holds {len(session.readers)} readers"
        run = session.run
        if run is None:
            return ""
        if run.committing is not None:
            return "its step is being committed"
        if not run.job.done():
            return "it opens its job"
        if run.job.cancelled() or run.job.exception() is not None:
            return ""
        return self._uncommitted(session, run.job.result())

    def _uncommitted(self, session: Session, job: Job) -> str:
        """Return a text about a rank's work under way; "" if its job has committed a step since the draining began."""
        if job.newest is None:
            return "its job has no committed step yet"
        if job.newest != self._committed.get(job.spec.name):
            return ""
        if job.pending is not None and not job.pending.is_untouched:
            return f"step {job.pending.step} is not committed yet"
        writes = sum(lease.mode.is_for_writing for lease in session.leases.values())
        return f"it holds {writes} write leases for a step that is not committed yet" if writes else ""
