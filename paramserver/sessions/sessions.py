"""Sessions: connected clients, how they live and end, and the leases that they hold.

A session is attached while its stream is open. When the stream breaks it is detached, and ends after a grace time
unless a new stream takes it up; it ends at once when the client closes it, and when nothing is heard of an attached one
for too long. Its end voids its leases: the word in the arena changes first, then the ranges are used for something
else. Owns the sessions and their timers; the streams are service.py's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.sessions.grants import Grants
from paramserver.sessions.host_quota import HostQuota
from paramserver.sessions.leases import Lease
from paramserver.sessions.quarantine import Quarantine
from paramserver.sessions.runs import Run, Runs
from paramserver.sessions.seats import SeatLimits, Seats, Visitor
from paramserver.sessions.session import Session, SessionState, Stream
from storage.engine import Engine
from storage.errors import ConflictError, NotFoundError
from storage.reader import StepReader
from storage.shard import JobSpec
from storage.slab import NEVER
from storage.slices import in_slices
from storage.tiers.arena import ArenaRange
from storage.versions import Job

log = logging.getLogger(__name__)

UNKNOWN_SESSION = "the session is unknown or has ended; open a new one"
# A timer that comes later than this says that the daemon itself did not run: what clients sent meanwhile is read first.
LATE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The configuration of sessions; see config.py."""

    heartbeat_timeout_seconds: float
    grace_seconds: float
    seats: SeatLimits


class Sessions:
    """All sessions of the daemon."""

    def __init__(self, engine: Engine, limits: SessionLimits, quotas: Quotas, on_end: Callable[[str], None]) -> None:
        """`on_end` is called with the id of each session that ends."""
        self.limits = limits
        self.is_stopping = False  # whether the daemon is: no session ends for any other reason then
        self._on_end = on_end
        self.quarantine = Quarantine(engine.host)
        self._engine = engine
        self._slots = engine.arena.slots
        self._runs: Runs[Session] = Runs(engine)
        self._sessions: dict[str, Session] = {}
        self._seats = Seats(limits.seats)
        self.grants = Grants(engine, HostQuota(quotas, engine, self._leases_of))
        self._reader_ids = itertools.count(1)
        self._cleaning_up: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Oldest first; may end sessions on the way."""
        return iter(list(self._sessions.values()))

    def get(self, session_id: str) -> Session:
        """Raises NotFoundError for a session that has ended or never was."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError(UNKNOWN_SESSION)
        return session

    def of_job(self, job: str) -> Collection[Session]:
        """Sessions attached to a job."""
        return self._runs.ranks_of(job)

    def _leases_of(self, job: str) -> Iterator[Lease]:
        return (lease for session in self.of_job(job) for lease in session.leases.values())

    def attached(self, job: str) -> int:
        """How many sessions are attached to a job."""
        return len(self.of_job(job))

    def readers_of(self, job: str) -> int:
        """How many readers hold a step of a job."""
        held = (reader for session in self._sessions.values() for reader in session.readers.values())
        return sum(reader.job.spec.name == job for reader in held)

    def readers_by(self, principal: Principal) -> int:
        """Return how many readers the sessions of a principal hold."""
        return sum(len(session.readers) for session in self._sessions.values() if session.owner == principal)

    # --- life

    def open(self, client: str, visitor: Visitor, stream: Stream) -> Session:
        """Open a session, attached to the stream.

        Raises:
            BudgetExceededError: a limit of Seats is reached.
        """
        self._seats.take(visitor)
        now = asyncio.get_running_loop().time()
        session = Session(secrets.token_hex(16), client, visitor, visitor.peer, self._slots.take(), stream, now)
        self._sessions[session.session_id] = session
        self._expect(session, self.limits.heartbeat_timeout_seconds)
        log.info("session opened by %s", client)
        return session

    def take_up(self, session: Session, peer: str, stream: Stream) -> None:
        """Attaches a session to a new stream. An older one that seems to be open still is ended: it may be a connection
        that is dead and does not know."""
        previous, session.stream, session.peer = session.stream, stream, peer
        if session.state is SessionState.ATTACHED:
            previous.end(ConflictError("another stream has taken this session up"))
        session.state = SessionState.ATTACHED
        session.heard()
        self._expect(session, self.limits.heartbeat_timeout_seconds)
        log.info("session of %s taken up again", session.client)

    def detach(self, session: Session, stream: Stream) -> None:
        """The stream broke. Unless it has taken the session up elsewhere, the client has the grace time for that."""
        if session.state is SessionState.ATTACHED and session.stream is stream:
            session.state = SessionState.DETACHED
            self._expect(session, self.limits.grace_seconds)
            log.info("stream of %s broke", session.client)

    def _expect(self, session: Session, seconds: float) -> None:
        """Something must be heard within this time."""
        if session.timer is not None:
            session.timer.cancel()
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(seconds, self._on_timer, session, loop.time() + seconds)

    def _on_timer(self, session: Session, due: float) -> None:
        now = asyncio.get_running_loop().time()
        timeout = self.limits.heartbeat_timeout_seconds
        attached = session.state is SessionState.ATTACHED
        if attached and now < session.heard_at + timeout:
            self._expect(session, session.heard_at + timeout - now)
        elif now - due > LATE_SECONDS:
            self._expect(session, LATE_SECONDS)
        elif attached:
            reason = f"no heartbeat for {timeout:g} s"
            self.end(session, reason)
            session.stream.end(NotFoundError(f"{UNKNOWN_SESSION} ({reason})"))
        else:
            self.end(session, f"its stream broke, and did not come back within {self.limits.grace_seconds:g} s")

    def end(self, session: Session, reason: str) -> None:
        """Voids the session: its leases, its prefetch window, and the unfinished step of its run. Idempotent."""
        if session.state is SessionState.ENDED:
            return
        session.state = SessionState.ENDED
        session.ended.set()
        if session.timer is not None:
            session.timer.cancel()
        del self._sessions[session.session_id]
        self._seats.give_back(session.visitor)
        self._engine.end_prefetch(session.session_id)
        self._on_end(session.session_id)
        held = len(session.leases)
        leases = self._void_leases(session)
        for reader in session.readers.values():
            reader.close()
        session.readers.clear()
        log.info("session of %s ended (%s); %d leases voided", session.client, reason, held)
        if session.run is not None:
            self._runs.leave(session.run, session.rank)
        self._in_background(self._clean_up(leases, session.run))

    async def _clean_up(self, leases: Sequence[Lease], run: Run[Session] | None) -> None:
        """Gives void leases back, in slices: a session may have had ten thousands. Then what the run left behind."""
        async for lease in in_slices(leases):
            self.grants.give_back(lease, NEVER)
        if run is not None:
            await self._runs.clean_up(run)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Does what a client that is gone, or does not wait, leaves to be done."""
        cleaning_up = asyncio.ensure_future(work)
        self._cleaning_up.add(cleaning_up)
        cleaning_up.add_done_callback(self._on_cleaned_up)

    def _on_cleaned_up(self, cleaning_up: asyncio.Task[None]) -> None:
        self._cleaning_up.discard(cleaning_up)
        if not cleaning_up.cancelled() and (error := cleaning_up.exception()) is not None:
            log.error("what a run left behind could not be cleaned up: %s", error, exc_info=error)

    async def close(self) -> None:
        """Ends all sessions."""
        for session in self:
            self.end(session, "the daemon shuts down")
        self.quarantine.close()
        if self._cleaning_up:
            await asyncio.wait(self._cleaning_up)

    # --- runs

    async def join(
        self,
        session: Session,
        spec: JobSpec,
        run_id: str,
        rank: int,
        *,
        may_exist: bool,
        must_exist: bool,
    ) -> Job:
        """Makes the session a rank of a run; the first one opens the job.

        Raises:
            ConflictError: another run holds the job, or the rank is taken.
        """
        if session.run is not None:
            raise ConflictError("this session has opened a job already; open another session for another job")
        run = self._runs.enter(session, spec, run_id, rank, may_exist=may_exist, must_exist=must_exist)
        session.run, session.rank = run, rank
        try:
            return await asyncio.shield(run.job)
        except BaseException:
            # Unless the session has ended meanwhile, and left with that.
            if session.state is not SessionState.ENDED:
                self._runs.leave(run, rank)
                session.run, session.rank = None, -1
            raise

    async def begin_layout(self, session: Session, first_step: int) -> None:
        """Gives the session's job another layout; see Runs.begin_layout."""
        await self._runs.begin_layout(session.require_run(), first_step)

    async def vote(self, session: Session, step: int, client_state: bytes, settled: int) -> bool:
        """One rank's vote for a step; see Runs.vote. Gradients whose updates could be withdrawn until now are the
        store's from here on."""
        self.grants.hand_over_all(session)
        return await self._runs.vote(session.require_run(), session.rank, step, client_state, settled)

    # --- the end of leases

    def _void_leases(self, session: Session) -> list[Lease]:
        """Changes the session's word, and takes its leases away. Returns those to be given back: all but what its
        process may still write to."""
        leases = list(session.leases.values())
        session.leases.clear()
        session.exclusive.clear()
        for lease in leases:
            lease.void = True
        if self.is_stopping and (session.run is None or session.run.committing is None):
            # What is not given back is not written to any more, so the client may go on with the bytes until it has
            # attached to the next daemon. A commit under way may wait for its leases, and write there.
            return []
        written = [lease for lease in leases if lease.mode.is_for_writing]
        held_back: list[ArenaRange] = []
        if session.slot is not None:
            self._slots.end(session.slot)
            if self._slots.is_held(session.slot):
                held_back = [self.grants.abandon(lease) for lease in written]
                leases = [lease for lease in leases if not lease.mode.is_for_writing]
        if session.slot is not None:
            self.quarantine.hold(session.slot, held_back)
        if held_back:
            log.warning(
                "%d ranges that %s may still write to are held back until its process closes the arena or ends",
                len(held_back),
                session.client,
            )
        return leases

    # --- readers

    def add_reader(self, session: Session, reader: StepReader) -> int:
        """Gives a reader to a session, which closes it at its end; its id."""
        if session.state is SessionState.ENDED:
            reader.close()
            raise NotFoundError("the session ended while it waited for a reader; open a new one")
        reader_id = next(self._reader_ids)
        session.readers[reader_id] = reader
        return reader_id

    def close_reader(self, session: Session, reader_id: int) -> None:
        """Closes a reader, and ends the leases on its ranges. Raises NotFoundError where the session has none such."""
        reader = session.reader(reader_id)
        reader.close()
        del session.readers[reader_id]
        leases = [lease for lease in session.leases.values() if lease.reader is reader]
        for lease in leases:
            lease.void = True
            session.drop(lease)
        self._in_background(self._clean_up(leases, None))
