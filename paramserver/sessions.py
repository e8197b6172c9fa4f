"""Sessions, their leases, and the runs that they form.

A *session* is one connected client. A *run* is one launch of a job: the sessions of its ranks. A session's end voids
its leases, and breaks its run: the step under way can then not be committed, unless every rank had voted for it.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from paramserver.tokens import Principal
from storage.engine import Engine, Pin
from storage.errors import ConflictError, InvalidRequestError, NotFoundError, StepAbortedError, StorageError
from storage.reader import StepReader
from storage.shard import DType, JobSpec, Kind
from storage.slab import NEVER, Slab
from storage.tiers.arena import ArenaRange
from storage.versions import Job

log = logging.getLogger(__name__)


class LeaseMode(enum.Enum):
    """What a lease allows."""

    READ = "read"
    STAGE = "stage"  # write the initial bytes of a slab
    PUT = "put"  # write its bytes of a later step
    RANGE = "range"  # read a range of a tensor
    GRADIENT = "gradient"  # write a gradient


@dataclass(slots=True, eq=False)
class Lease:
    """A session's right to a range of the arena."""

    lease_id: int
    group: str
    mode: LeaseMode
    nbytes: int
    region: ArenaRange
    pin: Pin | None  # None: a gradient, bytes to put or a range, which are no slab's
    slab: Slab | None = None  # that the bytes are to be put as
    step: int = 0  # of the bytes, if they are to be put or are a range
    reader: StepReader | None = None  # that a range is of
    dtype: DType | None = None  # of a range
    void: bool = False


@dataclass(slots=True, eq=False)
class Vote:
    """A step on its way to its commit. `done` gives whether it is durable."""

    step: int
    done: asyncio.Future[bool]
    client_states: dict[int, bytes] = field(default_factory=dict)
    settled: int | None = None


@dataclass(slots=True, eq=False)
class Run:
    """One launch of a job."""

    run_id: str
    spec: JobSpec
    job: asyncio.Task[Job]
    ranks: dict[int, Session] = field(default_factory=dict)
    vote: Vote | None = None
    committing: asyncio.Task[None] | None = None
    broken_by: str | None = None

    def check_whole(self) -> None:
        """Raises StepAbortedError once a rank is gone."""
        if self.broken_by is not None:
            raise StepAbortedError(
                f"{self.broken_by} of this run is gone, so no further step can be committed; restart the run: it goes "
                "on from the last committed step"
            )


@dataclass(slots=True, eq=False)
class Session:
    """One connected client."""

    session_id: str
    client: str
    # Who opened it: nobody else may use it.
    owner: Principal
    leases: dict[int, Lease] = field(default_factory=dict)
    readers: dict[int, StepReader] = field(default_factory=dict)
    run: Run | None = None
    rank: int = -1

    def require_run(self) -> Run:
        """Raises ConflictError before OpenJob."""
        if self.run is None:
            raise ConflictError("this session has not opened a job; call OpenJob first")
        return self.run

    async def job(self) -> Job:
        """The job of the session."""
        return await asyncio.shield(self.require_run().job)

    def lease(self, lease_id: int) -> Lease:
        """Raises NotFoundError for a lease that the session does not hold."""
        if lease_id not in self.leases:
            raise NotFoundError(
                f"lease {lease_id} is not held by this session; it was returned, consumed or never granted"
            )
        return self.leases[lease_id]

    def reader(self, reader_id: int) -> StepReader:
        """Raises NotFoundError for a reader that the session does not have."""
        if reader_id not in self.readers:
            raise NotFoundError(f"reader {reader_id} is not open in this session; it was closed or never opened")
        return self.readers[reader_id]


class Sessions:
    """All sessions and runs of the daemon."""

    def __init__(self, engine: Engine, on_end: Callable[[str], None]) -> None:
        """`on_end` is called with the id of each session that ends."""
        self._engine = engine
        self._on_end = on_end
        self._sessions: dict[str, Session] = {}
        self._runs: dict[str, Run] = {}
        self._lease_ids = itertools.count(1)
        self._reader_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, client: str, owner: Principal) -> Session:
        """A new session."""
        session = Session(secrets.token_hex(16), client, owner)
        self._sessions[session.session_id] = session
        log.info("session opened by %s", client)
        return session

    def get(self, session_id: str) -> Session:
        """Raises NotFoundError for a session that has ended or never was."""
        if session_id not in self._sessions:
            raise NotFoundError("the session is unknown or has ended; open a new one")
        return self._sessions[session_id]

    def of_job(self, job: str) -> Collection[Session]:
        """Sessions attached to a job."""
        return self._runs[job].ranks.values() if job in self._runs else ()

    def readers_of(self, job: str) -> int:
        """How many readers hold a step of a job."""
        held = (reader for session in self._sessions.values() for reader in session.readers.values())
        return sum(reader.job.spec.name == job for reader in held)

    def attached(self, job: str) -> int:
        """How many sessions are attached to a job."""
        return len(self.of_job(job))

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
        run = self._runs.get(spec.name)
        if run is None or (run.run_id != run_id and not run.ranks):
            opening = asyncio.ensure_future(self._open(run, spec, may_exist=may_exist, must_exist=must_exist))
            run = self._runs[spec.name] = Run(run_id, spec, opening)
        if run.run_id != run_id:
            clients = ", ".join(member.client for member in run.ranks.values())
            raise ConflictError(
                f"job {spec.name!r} is in use by another run ({clients}); stop that one, or use another job name"
            )
        if rank in run.ranks:
            raise ConflictError(f"rank {rank} of this run of job {spec.name!r} is attached already")
        if spec != run.spec:
            raise InvalidRequestError(
                f"rank {rank} describes job {spec.name!r} in another way than the other ranks of its run"
            )
        if run.job.done():
            # Why the job could not be opened, for a rank that comes after the one that tried.
            run.job.result()
        run.check_whole()
        run.ranks[rank] = session
        session.run, session.rank = run, rank
        try:
            return await asyncio.shield(run.job)
        except BaseException:
            self._leave(session, run)
            raise

    async def _open(self, previous: Run | None, spec: JobSpec, *, may_exist: bool, must_exist: bool) -> Job:
        if previous is not None and previous.committing is not None:
            await asyncio.wait([previous.committing])
        return await self._engine.open_job(spec, may_exist=may_exist, must_exist=must_exist)

    async def vote(self, session: Session, step: int, client_state: bytes, settled: int) -> bool:
        """One rank's vote for a step; returns once it is committed, whether it is durable.

        Raises:
            ConflictError: it is not the next step, or the ranks vote for different ones.
            StepAbortedError: a rank is gone.
            StorageError: an update of the step failed.
        """
        run, job = session.require_run(), await session.job()
        run.check_whole()
        # Before it counts: a vote that stays would hold up the right one.
        job.open_pending(step)
        if run.vote is None:
            run.vote = Vote(step, asyncio.get_running_loop().create_future())
            run.vote.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        vote = run.vote
        if vote.step != step:
            raise ConflictError(
                f"rank {session.rank} votes for step {step} while other ranks vote for step {vote.step}"
            )
        vote.client_states[session.rank] = client_state
        vote.settled = settled if vote.settled is None else min(vote.settled, settled)
        if len(vote.client_states) == run.spec.local_ranks and run.committing is None:
            run.committing = asyncio.ensure_future(self._commit(run, job, vote))
        return await asyncio.shield(vote.done)

    async def _commit(self, run: Run, job: Job, vote: Vote) -> None:
        everywhere = run.spec.local_ranks == run.spec.world_size
        settled = vote.step if everywhere else vote.settled or 0
        try:
            durable = await self._engine.commit(job, vote.step, vote.client_states, settled)
        except StorageError as error:
            log.error("step %d of job %s was not committed: %s", vote.step, job.spec.name, error)
            vote.done.set_exception(error)
        except Exception as error:
            log.exception("step %d of job %s was not committed", vote.step, job.spec.name)
            vote.done.set_exception(error)
        else:
            vote.done.set_result(durable)
        finally:
            run.vote = None
            run.committing = None

    # --- leases

    async def lease_for_reading(self, session: Session, group: str, kind: Kind, position: float) -> Lease:
        """A shared lease on the newest bytes of a slab."""
        pin = await self._engine.fetch(await session.job(), group, kind, position)
        return self._grant(session, group, LeaseMode.READ, pin.slab.nbytes, pin.region, pin)

    async def lease_for_staging(self, session: Session, group: str, kind: Kind) -> Lease:
        """An exclusive lease for the initial bytes of a slab."""
        pin = await self._engine.stage(await session.job(), group, kind)
        return self._grant(session, group, LeaseMode.STAGE, pin.slab.nbytes, pin.region, pin)

    async def lease_for_putting(self, session: Session, step: int, group: str, kind: Kind) -> Lease:
        """An exclusive lease for the bytes of a slab at a later step than 0."""
        job = await session.job()
        slab = job.slab(group, kind)
        if any(lease.slab is slab for lease in session.leases.values()):
            raise ConflictError(f"{slab.key} is being written by another lease of this session")
        region = await self._engine.allocate_put(job, step, group, kind)
        return self._grant(session, group, LeaseMode.PUT, slab.nbytes, region, None, slab=slab, step=step)

    def lease_range(
        self, session: Session, reader: StepReader, fqn: str, dtype: DType, nbytes: int, region: ArenaRange
    ) -> Lease:
        """A lease on a range of a tensor, of which the arena holds a copy for it."""
        lease = self._grant(session, fqn, LeaseMode.RANGE, nbytes, region, None, step=reader.step)
        lease.reader, lease.dtype = reader, dtype
        return lease

    async def lease_for_gradient(self, session: Session, group: str) -> Lease:
        """An exclusive lease for the gradient of a group."""
        job = await session.job()
        if any(lease.mode is LeaseMode.GRADIENT and lease.group == group for lease in session.leases.values()):
            raise ConflictError(f"the gradient of group {group!r} is leased by this session already")
        region = await self._engine.allocate_gradient(job, group)
        nbytes = job.group(group).spec.slab_bytes(Kind.GRAD)
        return self._grant(session, group, LeaseMode.GRADIENT, nbytes, region, None)

    def _grant(
        self,
        session: Session,
        group: str,
        mode: LeaseMode,
        nbytes: int,
        region: ArenaRange,
        pin: Pin | None,
        *,
        slab: Slab | None = None,
        step: int = 0,
    ) -> Lease:
        lease = Lease(next(self._lease_ids), group, mode, nbytes, region, pin, slab, step)
        if session.session_id not in self._sessions:
            self._give_back(lease, NEVER)
            raise NotFoundError("the session ended while it waited for a lease; open a new one")
        session.leases[lease.lease_id] = lease
        return lease

    def consume_gradient(self, session: Session, lease: Lease) -> ArenaRange:
        """Takes the range out of the session's hands; the caller owns it now."""
        lease.void = True
        return session.leases.pop(lease.lease_id).region

    async def release(self, session: Session, lease: Lease, *, publish: bool, next_use: float) -> None:
        """Ends a lease; with `publish`, staged bytes become the slab's version."""
        if publish and lease.mode not in (LeaseMode.STAGE, LeaseMode.PUT):
            raise InvalidRequestError(
                f"lease {lease.lease_id} ({lease.mode.value}) cannot be published; write leases can"
            )
        # It may have ended since it was looked up: with its session, or with the reader that it is of.
        session.lease(lease.lease_id)
        lease.void = True
        del session.leases[lease.lease_id]
        if publish and lease.pin is not None:
            await self._engine.publish(lease.pin)
        elif publish and lease.slab is not None:
            key = lease.slab.key
            await self._engine.put(await session.job(), lease.step, key.group, key.kind, lease.region)
        else:
            self._give_back(lease, next_use)

    def _give_back(self, lease: Lease, next_use: float) -> None:
        lease.void = True
        if lease.pin is None:
            self._engine.free_loose(lease.region)
        else:
            self._engine.unpin(lease.pin, next_use)

    # --- readers

    def hold(self, session: Session, reader: StepReader) -> int:
        """Gives a reader to a session, which closes it at its end; its id."""
        if session.session_id not in self._sessions:
            reader.close()
            raise NotFoundError("the session ended while it waited for a reader; open a new one")
        reader_id = next(self._reader_ids)
        session.readers[reader_id] = reader
        return reader_id

    def let_go(self, session: Session, reader_id: int) -> None:
        """Closes a reader, and ends the leases on its ranges. Raises NotFoundError where the session has none such."""
        reader = session.reader(reader_id)
        reader.close()
        del session.readers[reader_id]
        for lease in [lease for lease in session.leases.values() if lease.reader is reader]:
            del session.leases[lease.lease_id]
            self._give_back(lease, NEVER)

    # --- the end

    async def end(self, session: Session, reason: str) -> None:
        """Voids the session: its leases, its prefetch window, and the unfinished step of its run."""
        del self._sessions[session.session_id]
        self._engine.end_prefetch(session.session_id)
        self._on_end(session.session_id)
        for lease in session.leases.values():
            self._give_back(lease, NEVER)
        held = len(session.leases)
        session.leases.clear()
        for reader in session.readers.values():
            reader.close()
        session.readers.clear()
        log.info("session of %s ended (%s); %d leases voided", session.client, reason, held)
        if session.run is not None:
            self._leave(session, session.run)
            await self._clean_up(session.run)

    def _leave(self, session: Session, run: Run) -> None:
        run.ranks.pop(session.rank, None)
        run.broken_by = run.broken_by or f"rank {session.rank} ({session.client})"
        # Voted by all: the step will be finished. Otherwise it never can be.
        if run.vote is not None and run.committing is None:
            try:
                run.check_whole()
            except StepAbortedError as error:
                run.vote.done.set_exception(error)
            run.vote = None

    async def _clean_up(self, run: Run) -> None:
        """After the last rank: what the run left behind is abandoned, and host memory given back."""
        if run.ranks or run.job.cancelled() or not run.job.done() or run.job.exception() is not None:
            return
        job = run.job.result()
        if run.committing is not None:
            await asyncio.wait([run.committing])
        if self._runs.get(run.spec.name) is run:
            await self._engine.detach(job)
