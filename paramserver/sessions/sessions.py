"""The sessions of all connected clients, from their beginning to their end.

A session is attached while its stream is open. When the stream breaks, the session is detached, and it ends after a
grace time unless the client takes it up with a new stream. It ends at once when the client closes it, and when no
heartbeat of an attached session comes for too long.

This module owns the sessions, their timers and their readers; service.py owns the streams. It must never free a range
itself, because the client's process may still write to it: cleanup.py frees the ranges that can be freed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from paramserver.errors import StaleCallError
from paramserver.events import EventKind, EventLog
from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.sessions.cleanup import Cleanup
from paramserver.sessions.gradient_updates import GradientUpdates
from paramserver.sessions.grants import Grants
from paramserver.sessions.host_quota import HostQuota
from paramserver.sessions.leases import Lease
from paramserver.sessions.log_context import logged_for
from paramserver.sessions.quarantine import Quarantine
from paramserver.sessions.replicas import Replicas
from paramserver.sessions.runs import Run, Runs
from paramserver.sessions.seats import SeatLimits, Seats, Visitor
from paramserver.sessions.session import Session, SessionStream
from paramserver.sessions.session_state import SessionState, SessionVerb
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import ConflictError, NotFoundError
from storage.base.shard import GroupSpec, JobSpec
from storage.base.waiting import LATE_SECONDS
from storage.engine import Engine
from storage.jobs.admission import Limit
from storage.state.versions import Job
from storage.steps.reader import StepReader

log = logging.getLogger(__name__)

UNKNOWN_SESSION = "the session is unknown or has ended; open a new one"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The configuration of sessions; config.py explains the values."""

    heartbeat_timeout_seconds: float
    grace_seconds: float
    late_copy_seconds: float
    seats: SeatLimits


class Sessions:
    """The table of the daemon's sessions: it opens, resumes and ends them, and passes their calls to their runs."""

    def __init__(
        self, engine: Engine, limits: SessionLimits, quotas: Quotas, events: EventLog, on_end: Callable[[str], None]
    ) -> None:
        """Make the table of a daemon's sessions, which is empty at first.

        Args:
            engine: gives the arena's slots, and what the sessions lease and read.
            limits: see config.py.
            quotas: limit the sessions of jobs, and the host memory that the jobs and tokens lease.
            events: gets the beginning and the end of each session, and the commits of the runs.
            on_end: is called with the id of each session that ends.
        """
        self.limits = limits
        # True once the daemon stops. Sessions that end from then on end because of the stop, so the daemon sends the
        # other ranks of the run no notice. The ranges of their leases are not freed, so that clients can read them
        # until they attach to the next daemon; `Cleanup.void_leases` says why a commit under way is an exception.
        self.is_stopping = False
        # The number of sessions that ended because their clients were silent, or did not come back after their streams
        # broke.
        self.lost = 0
        # Until this time on the event loop's clock, no session ends because its client is silent.
        self._lenient_until = 0.0
        self._on_end = on_end
        self.quarantine = Quarantine(engine.host, limits.late_copy_seconds)
        self._engine = engine
        self._quotas = quotas
        self._events = events
        self._slots = engine.host.arena.slots
        self._runs: Runs[Session] = Runs(engine, events)
        self._sessions: dict[str, Session] = {}
        self._seats = Seats(limits.seats)
        self.grants = Grants(engine, HostQuota(quotas, engine, self._leases_of))
        self.updates = GradientUpdates(engine)
        self._cleanup = Cleanup(self._slots, self.quarantine, self.grants, self._runs)
        self._reader_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions, oldest first. The caller may end sessions meanwhile."""
        return iter(list(self._sessions.values()))

    def get(self, session_id: str) -> Session:
        """Return the session with an id.

        Raises:
            NotFoundError: the session has ended, or there never was one with that id.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError(UNKNOWN_SESSION)
        return session

    def of_job(self, job: str) -> Collection[Session]:
        """Return the sessions that have opened a job as its ranks."""
        return self._runs.ranks_of(job)

    def _leases_of(self, job: str) -> Iterator[Lease]:
        return (lease for session in self.of_job(job) for lease in session.leases.values())

    @property
    def replicas(self) -> Replicas:
        """The reports of how far the replicas of this daemon's jobs in other daemons are."""
        return self._runs.replicas

    def attached(self, job: str) -> int:
        """Return how many sessions have opened a job as its ranks."""
        return len(self.of_job(job))

    @property
    def empty_jobs(self) -> Set[str]:
        """The jobs in the store that their ranks have left without a commit; see Runs.empty_jobs."""
        return self._runs.empty_jobs

    def readers_of(self, job: str) -> int:
        """Return how many readers hold a step of a job."""
        held = (reader for session in self._sessions.values() for reader in session.readers.values())
        return sum(reader.job.spec.name == job for reader in held)

    def readers_by(self, principal: Principal) -> int:
        """Return how many readers the sessions of a principal hold."""
        return sum(len(session.readers) for session in self._sessions.values() if session.owner == principal)

    # The following methods begin and end sessions.

    def open(self, client: str, visitor: Visitor, stream: SessionStream, *, registers_arena: bool) -> Session:
        """Open a session, attached to the stream.

        `registers_arena` says whether a device may copy from and to the arena on its own for the client's process.

        Raises:
            BudgetExceededError: a limit of Seats is reached.
        """
        self._seats.take(visitor)
        now = asyncio.get_running_loop().time()
        session = Session(
            secrets.token_hex(16), client, visitor, visitor.peer, self._slots.take(), stream, registers_arena, now
        )
        self._sessions[session.session_id] = session
        self._expect(session, self.limits.heartbeat_timeout_seconds)
        with logged_for(session):
            log.info("session opened by %s", client)
        self._events.add(EventKind.SESSION, client, f"a session began, from {visitor.place}")
        return session

    def take_up(self, session: Session, visitor: Visitor, stream: SessionStream, number: int) -> None:
        """Attach a session to a new stream of its client.

        An older stream that still seems to be open is ended, because its connection may be dead without the daemon's
        knowledge.

        Args:
            session: the session.
            visitor: its client.
            stream: the new stream.
            number: the number that the client has given the stream; a later stream has a higher one. 0 if the client
                numbers no streams.

        Raises:
            StaleCallError: the session has had a later stream.
        """
        if number and number <= session.stream_number:
            raise StaleCallError("the session was taken up by a later stream")
        previous, session.stream, session.peer = session.stream, stream, visitor.peer
        if session.state is SessionState.ATTACHED:
            previous.end(ConflictError("another stream has taken this session up"))
        session.enter(SessionVerb.TAKE_UP)
        session.stream_number = number
        session.heard()
        self._expect(session, self.limits.heartbeat_timeout_seconds)
        with logged_for(session):
            log.info("session of %s taken up again", session.client)
        self._events.add(EventKind.SESSION, session.client, f"the session was taken up again, from {visitor.place}")

    def detach(self, session: Session, stream: SessionStream) -> None:
        """Detach a session whose stream broke: from now on the client has the grace time to take it up again.

        If the client has already taken the session up with another stream, this has no effect.
        """
        if session.state is SessionState.ATTACHED and session.stream is stream:
            session.enter(SessionVerb.DETACH)
            self._expect(session, self.limits.grace_seconds)
            with logged_for(session):
                log.info("stream of %s broke", session.client)
            self._events.add(EventKind.SESSION, session.client, "the session's connection broke")

    def _expect(self, session: Session, seconds: float) -> None:
        """End the session after `seconds`, unless a message or a new stream of its client comes before."""
        if session.timer is not None:
            session.timer.cancel()
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(seconds, self._on_timer, session, loop.time() + seconds)

    def _on_timer(self, session: Session, due: float) -> None:
        now = asyncio.get_running_loop().time()
        timeout = self.limits.heartbeat_timeout_seconds
        attached = session.state is SessionState.ATTACHED
        if now - due > LATE_SECONDS:
            self.stood_still(now - due)
        patient_until = max(self._lenient_until, session.heard_at + timeout if attached else due)
        if now < patient_until:
            self._expect(session, patient_until - now)
        elif attached:
            self.lost += 1
            reason = f"no heartbeat for {timeout:g} s"
            self.end(session, reason)
            session.stream.end(NotFoundError(f"{UNKNOWN_SESSION} ({reason})"))
        else:
            self.lost += 1
            self.end(session, f"its stream broke, and did not come back within {self.limits.grace_seconds:g} s")

    def stood_still(self, seconds: float) -> None:
        """Take note that the event loop stood still until now, so that the daemon itself could not hear its clients.

        After this call, no session ends for its client's silence for as long as the loop stood still, but at most for
        the heartbeat time-out. In that time the daemon reads what the clients have sent, and clients whose connection
        broke connect again.
        """
        again = min(seconds, self.limits.heartbeat_timeout_seconds)
        self._lenient_until = max(self._lenient_until, asyncio.get_running_loop().time() + again)

    def end(self, session: Session, reason: str, *, is_closed: bool = False) -> None:
        """End a session: void its leases, remove its prefetch window, and abandon the unfinished step of its run.

        `is_closed` says whether the client has closed the session itself. A second call does nothing.
        """
        if session.state is SessionState.ENDED:
            return
        session.enter(SessionVerb.END)
        session.answers.close()
        session.ended.set()
        if session.timer is not None:
            session.timer.cancel()
        del self._sessions[session.session_id]
        self._seats.release(session.visitor)
        self._engine.queue.replace_window(session.session_id, [])
        self.grants.device_copies.forget(session)
        self._on_end(session.session_id)
        held = len(session.leases)
        leases = self._cleanup.void_leases(session, is_stopping=self.is_stopping)
        for reader in session.readers.values():
            reader.close()
        session.readers.clear()
        with logged_for(session):
            log.info("session of %s ended (%s); %d leases voided", session.client, reason, held)
        self._events.add(EventKind.SESSION, session.client, f"the session ended ({reason}); {held} leases voided")
        if session.run is not None:
            self._runs.leave(session.run, session.rank, is_closed=is_closed)
            if not self.is_stopping:
                self._tell_others(session, session.run, reason, is_closed=is_closed)
        self._cleanup.begin(leases, session.run)

    def _tell_others(self, session: Session, run: Run[Session], reason: str, *, is_closed: bool) -> None:
        """Send a notice to the other ranks of a run that one rank has gone.

        Without the notice, the other ranks would wait in a collective until its time-out.
        """
        notice = pb.SessionResponse.Notice(
            text=f"the session of rank {session.rank} ({session.client}) has ended: {reason}",
            event=pb.SessionResponse.EVENT_RANK_CLOSED if is_closed else pb.SessionResponse.EVENT_RANK_GONE,
        )
        for other in run.ranks.values():
            other.stream.post((notice.event, session.rank), pb.SessionResponse(notice=notice))

    async def close(self) -> None:
        """End all sessions, and wait until their leases are freed and their runs are cleaned up."""
        for session in self:
            self.end(session, "the daemon shuts down")
        self.quarantine.close()
        await self._cleanup.until_done()

    # The following methods concern the runs that the ranks of a job make.

    async def join(
        self,
        session: Session,
        spec: JobSpec,
        run_id: str,
        rank: int,
        *,
        may_exist: bool,
        must_exist: bool,
        comes_back: bool = False,
    ) -> Job:
        """Make the session a rank of a run, and return the run's job, which the run's first rank opens.

        `comes_back` says whether the rank was attached to this run before, with a session that has ended.

        Raises:
            ConflictError: another run holds the job, the rank is taken, or the session has opened a job already.
            NotFoundError: the session has ended.
            BudgetExceededError: the job has as many sessions as its quota allows.
            StorageError: see Runs.enter.
        """
        if self._end_lost_copies(spec.name, run_id, "its client was lost, and a run opens its job"):
            await self._cleanup.until_done()
        await self._until_lost_run_ends(spec.name, run_id)
        if comes_back and not self.attached(spec.name):
            # The former sessions of this run have left a step unfinished. The store abandons it before this rank joins,
            # because the run begins the step anew.
            await self._cleanup.until_done()
        # While this call waited, the session may have ended, or another call of the session may have opened a job. So
        # both are checked now.
        self.get(session.session_id)
        if session.run is not None:
            raise ConflictError("this session has opened a job already; open another session for another job")
        # The sessions attached to the job are those of this run, because the ranks of a lost run have gone by now. No
        # other rank can join before this one, because nothing is awaited until then.
        self._quotas.of(spec.name).check_sessions(spec.name, self.attached(spec.name))
        run = self._runs.enter(
            session, spec, run_id, rank, may_exist=may_exist, must_exist=must_exist, comes_back=comes_back
        )
        session.run, session.rank = run, rank
        try:
            return await asyncio.shield(run.job)
        except BaseException:
            # If the session has ended while the job was opened, its end has removed it from the run already, so this is
            # not repeated.
            if session.state.has_leases:
                self._runs.leave(run, rank)
                session.run, session.rank = None, -1
                self._cleanup.begin((), run)
            raise

    async def until_no_vote(self, timeout_seconds: float) -> bool:
        """Wait until no commit is under way in any run; see Runs.until_no_vote."""
        return await self._runs.until_no_vote(timeout_seconds)

    def closed(self, job: str) -> AbstractContextManager[None]:
        """Keep ranks from opening a job as long as the context lasts; see Runs.closed."""
        return self._runs.closed(job)

    def forget_job(self, job: str) -> None:
        """Forget a job that was deleted; see Runs.forget_job."""
        self._runs.forget_job(job)

    async def begin_copy(self, job: str, run_id: str, origin: str, token: str = "") -> bool:
        """Announce a run that copies a step into a job; see Runs.begin_copy.

        The sessions of a former copy whose client is lost end at once, and not when their grace time is over.
        """
        self._end_lost_copies(job, run_id, "another copy into its job was begun")
        await self._cleanup.until_done()
        return self._runs.begin_copy(job, run_id, origin, token)

    async def _until_lost_run_ends(self, job: str, run_id: str) -> None:
        """Wait while another run holds a job and each of its ranks has lost its stream, at most for their grace time.

        So a run that is started right after the end of another one, as launchers do, is not refused because of ranks
        that are lost already.
        """
        while others := [other for other in self.of_job(job) if other.run is not None and other.run.run_id != run_id]:
            if any(other.state is not SessionState.DETACHED for other in others):
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(others[0].ended.wait(), self.limits.grace_seconds)

    def _end_lost_copies(self, job: str, run_id: str, reason: str) -> bool:
        """End the sessions of another run that is a copy and has lost its client. Return whether there were any.

        Otherwise the next run could open the job only after the grace time of these sessions.
        """
        lost = [
            session
            for session in self.of_job(job)
            if session.state is SessionState.DETACHED
            and session.run is not None
            and session.run.run_id != run_id
            and self._runs.is_copy(session.run)
        ]
        for session in lost:
            self.end(session, reason)
        return bool(lost)

    async def register(self, session: Session, job: Job, specs: Sequence[GroupSpec], limits: Sequence[Limit]) -> None:
        """Register groups of the session's job; see Runs.register.

        Raises:
            NotFoundError: the session has ended.
            StorageError: see Engine.register.
        """
        # The end of a session cancels the registrations under way, but none that begins later. So this checks that the
        # session has not ended.
        self.get(session.session_id)
        await self._runs.register(session.require_run(), job, specs, limits)

    async def begin_layout(self, session: Session, first_step: int) -> None:
        """Give the session's job another layout; see Runs.begin_layout."""
        await self._runs.begin_layout(session.require_run(), first_step)

    async def roll_back(self, session: Session, step: int) -> None:
        """Make a committed step of the session's job the newest one again; see Runs.roll_back."""
        await self._runs.roll_back(session.require_run(), step)

    async def amend(self, session: Session, step: int, client_state: bytes) -> None:
        """Replace the client state that the session's rank has stored with the newest step; see Runs.amend."""
        await self._runs.amend(session.require_run(), session.rank, step, client_state)

    async def settle(self, session: Session, step: int, *, records: bool) -> None:
        """Take note that all ranks of the session's job, on all nodes, have committed a step; see Runs.settle."""
        await self._runs.settle(session.require_run(), step, records=records)

    async def vote(self, session: Session, step: int, client_state: bytes, settled: int) -> bool:
        """Vote for a step as the session's rank, and return whether the committed step is durable; see Runs.vote.

        The rank can no longer withdraw the updates that it has begun: their gradients now belong to the store.
        """
        self.updates.hand_over_all(session)
        return await self._runs.vote(session.require_run(), session.rank, step, client_state, settled)

    # The following methods concern the readers of a session.

    def add_reader(self, session: Session, reader: StepReader) -> int:
        """Give a reader to a session, whose end closes the reader. Return the reader's id.

        Raises:
            NotFoundError: the session has ended; the reader is closed then.
        """
        if not session.state.has_leases:
            reader.close()
            raise NotFoundError("the session ended while it waited for a reader; open a new one")
        reader_id = next(self._reader_ids)
        session.readers[reader_id] = reader
        return reader_id

    def close_reader(self, session: Session, reader_id: int) -> None:
        """Close a reader, and end the leases on its ranges.

        Raises:
            NotFoundError: the session has no such reader.
        """
        reader = session.reader(reader_id)
        reader.close()
        del session.readers[reader_id]
        leases = [lease for lease in session.leases.values() if lease.reader is reader]
        for lease in leases:
            lease.void = True
            session.remove_lease(lease)
        self._cleanup.begin(leases, None)
