"""The runs of jobs. A run is one launch of a job; it has the ranks on this node, and their votes for a step.

When a rank goes, its run is broken: the step under way can be committed only if every rank has voted for it already.
This module owns the newest run of each job. It must never commit a step without the votes of all ranks on this node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from structlog.contextvars import bind_contextvars, unbind_contextvars

from paramserver.contract.printable import printable
from paramserver.events import EventKind, EventLog
from paramserver.sessions.copies import UNFINISHED_SECONDS, Copies
from paramserver.sessions.replicas import Replicas
from storage.base.errors import ConflictError, InvalidRequestError, NotFoundError, StepAbortedError, StorageError
from storage.base.shard import GroupSpec, JobSpec
from storage.base.waiting import unlogged
from storage.engine import Engine
from storage.jobs.admission import Limit
from storage.state.versions import Job, check_layout

log = logging.getLogger(__name__)

# The most jobs without a commit that the daemon keeps after all their ranks have gone. They are kept for late ranks of
# their runs, which come within minutes. Only a few are kept, because a job may describe 262,144 parameters.
MOST_EMPTY_JOBS = 16


class Member(Protocol):
    """What a run needs of a session that is one of its ranks."""

    @property
    def client(self) -> str:
        """The client's name, for error texts."""


MemberT = TypeVar("MemberT", bound=Member)


@dataclass(slots=True, eq=False)
class Vote:
    """The ranks' votes for a step.

    Attributes:
        step: the step that they vote for.
        done: a future that gets whether the committed step is durable, or the error that ended the vote.
        client_states: the state that each rank that has voted stores with the step, to find that state when the rank
            resumes.
        settled: the lowest `settled_step` of the ranks that have voted.
    """

    step: int
    done: asyncio.Future[bool]
    client_states: dict[int, bytes] = field(default_factory=dict)
    settled: int | None = None


@dataclass(slots=True, eq=False)
class Run(Generic[MemberT]):
    """One launch of a job.

    Attributes:
        job: a future that gets the job, once the first rank has opened it.
        ranks: the members that are attached now, by rank.
        vote: the vote under way.
        committing: the commit under way.
        registering: the registrations of groups under way, which end with the run.
        layout: the change to another layout of the job, once a rank has begun it.
        first_step: the number of the first commit in `layout`.
        broken_by: the first rank that has gone, or None if no rank has gone.
        left_by: the first rank that has closed its session, so that it does not come back. None if no rank has.
    """

    run_id: str
    spec: JobSpec
    job: asyncio.Future[Job]
    ranks: dict[int, MemberT] = field(default_factory=dict)
    vote: Vote | None = None
    committing: asyncio.Task[None] | None = None
    registering: set[asyncio.Task[None]] = field(default_factory=set)
    layout: asyncio.Task[None] | None = None
    first_step: int = 0
    broken_by: str | None = None
    left_by: str | None = None

    def check_whole(self) -> None:
        """Check that no rank of the run has gone.

        Raises:
            StepAbortedError: a rank has gone.
        """
        if self.broken_by is not None:
            raise _is_gone(self.broken_by)

    def check_can_begin_anew(self) -> None:
        """Check that the run can begin anew: all its ranks have gone, but none has closed its session.

        Raises:
            StepAbortedError: a rank has closed its session, so it does not come back.
        """
        if self.left_by is not None:
            raise _is_gone(self.left_by)

    def check_layout(self, job: Job) -> None:
        """Check that the job is cut into shards as this run has declared it, so that the run can train it.

        Raises:
            ConflictError: the number of ranks, a parameter or the durability differs.
        """
        # A run that opens its job, or begins a layout of it, shares its object of all parameters with the engine's job.
        # If the two are the same object, the comparison of ten thousands of parameters at each step is left out.
        if job.spec.parameters is not self.spec.parameters:
            check_layout(job.spec, self.spec)


class Runs(Generic[MemberT]):
    """The newest run of each job that is in the store or has ranks.

    A run whose ranks have gone is kept with its job, so that a late rank of it learns that the run is broken. Of the
    jobs without a commit whose ranks have gone, only the newest MOST_EMPTY_JOBS are kept.

    Attributes:
        replicas: the reports of how far the replicas of the jobs in other daemons are.
    """

    def __init__(self, engine: Engine, events: EventLog) -> None:
        self._engine = engine
        self._events = events
        self._runs: dict[str, Run[MemberT]] = {}
        # The jobs without a commit that all ranks have left, in the order in which their runs ended, so that the oldest
        # is forgotten first.
        self._empty: dict[str, None] = {}
        self._copies = Copies(self._end_copy)
        self.replicas = Replicas(events)
        # The jobs that no rank can open now, because a caller of `closed` keeps them closed.
        self._closed: set[str] = set()

    def ranks_of(self, job: str) -> Collection[MemberT]:
        """Return the ranks that are attached to a job."""
        return self._runs[job].ranks.values() if job in self._runs else ()

    @property
    def empty_jobs(self) -> Set[str]:
        """The jobs in the store that have neither a commit nor ranks, nor bytes that another run could go on with."""
        return self._empty.keys()

    async def until_no_vote(self, timeout_seconds: float) -> bool:
        """Wait until no vote for a step is under way. Return False if one still is after the time-out.

        If this returns True, no rank votes before the caller's next `await`, because no other task runs before it.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while votes := [run.committing or run.vote.done for run in self._runs.values() if run.vote is not None]:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return False
            await asyncio.wait(votes, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        return True

    @contextmanager
    def closed(self, job: str) -> Iterator[None]:
        """Keep ranks from opening a job as long as the context lasts.

        Raises:
            ConflictError: ranks are attached to the job, or another caller keeps it closed.
        """
        if attached := len(self.ranks_of(job)):
            raise ConflictError(f"job {job!r} has {attached} sessions attached; stop its trainers first")
        self._check_not_closed(job)
        self._closed.add(job)
        try:
            yield
        finally:
            self._closed.discard(job)

    def is_copy(self, run: Run[MemberT]) -> bool:
        """Return whether a run was announced as a copy of a step of another store."""
        return self._copies.find(run.spec.name, run.run_id) is not None

    def begin_copy(self, job: str, run_id: str, origin: str, token: str = "") -> bool:
        """Announce a run that copies a step of another store into a job; see Copies.begin.

        Raises:
            ConflictError: ranks are attached to the job, or an operator keeps it closed.
            BudgetExceededError: too many copies are announced.
        """
        if attached := self.ranks_of(job):
            clients = ", ".join(member.client for member in attached)
            raise ConflictError(f"job {job!r} is in use here ({clients}); stop that first")
        self._check_not_closed(job)
        return self._copies.begin(job, run_id, origin, token)

    def _check_not_closed(self, job: str) -> None:
        if job in self._closed:
            raise ConflictError(f"job {job!r} is being rolled back by an operator; try again")

    def enter(
        self,
        member: MemberT,
        spec: JobSpec,
        run_id: str,
        rank: int,
        *,
        may_exist: bool,
        must_exist: bool,
        comes_back: bool = False,
    ) -> Run[MemberT]:
        """Add a rank to its run, and return the run. The first rank of a run opens the job.

        A run that has lost all its ranks begins anew, from the newest commit, when one of them `comes_back`. Any other
        rank of such a run is late: it is refused, because it would wait without end for the ranks that have gone. A
        rank that comes back is refused, too, if another rank has closed its session, as ranks do when one is lost.

        Raises:
            ConflictError: another run holds the job, or the rank is attached already, or as many ranks are attached as
                the run has on this store, or the job is closed.
            InvalidRequestError: the rank describes the job in another way than the run's first rank.
            StepAbortedError: a rank of the run has gone.
            StorageError: the run's first rank could not open the job.
        """
        self._check_not_closed(spec.name)
        run = self._runs.get(spec.name)
        if run is not None and run.run_id == run_id and comes_back:
            run.check_can_begin_anew()
        if run is None or (not run.ranks and (run.run_id != run_id or (comes_back and run.broken_by is not None))):
            # The job is opened in a task. If it cannot be opened, the call of each rank that waits for the job raises
            # the error.
            goes_on = self._copies.enter(spec.name, run_id)
            self.replicas.forget(spec.name)
            self._empty.pop(spec.name, None)
            opening = unlogged(
                asyncio.ensure_future(
                    self._open(run, spec, run_id, may_exist=may_exist, must_exist=must_exist, goes_on=goes_on)
                )
            )
            run = self._runs[spec.name] = Run(run_id, spec, opening)
        if run.run_id != run_id:
            clients = ", ".join(other.client for other in run.ranks.values())
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
            # If the run's first rank could not open the job, `result` raises the same error for this rank.
            run.job.result()
        run.check_whole()
        if len(run.ranks) >= spec.local_ranks:
            # The run has all its ranks already: `local_ranks` votes commit a step. With one rank more, steps would be
            # committed without that rank's vote, so the rank is refused.
            raise ConflictError(
                f"rank {rank} of this run of job {spec.name!r} is one too many: {len(run.ranks)} ranks are attached, "
                "as attached_ranks says; set attached_ranks to the number of ranks that attach to this store"
            )
        run.ranks[rank] = member
        return run

    async def _open(
        self,
        previous: Run[MemberT] | None,
        spec: JobSpec,
        run_id: str,
        *,
        may_exist: bool,
        must_exist: bool,
        goes_on: bool,
    ) -> Job:
        try:
            if previous is not None and previous.committing is not None:
                await asyncio.wait([previous.committing])
            job = await self._engine.open_job(spec, may_exist=may_exist, must_exist=must_exist, goes_on=goes_on)
        except BaseException:
            self._copies.refused(spec.name)
            raise
        self._copies.opened(spec.name, run_id)
        found = "without a committed step" if job.newest is None else f"at step {job.newest}"
        ranks = "1 rank" if spec.world_size == 1 else f"{spec.world_size} ranks"
        self._events.add(EventKind.JOB, spec.name, f"a run of {ranks} opened the job, {found}")
        return job

    async def begin_layout(self, run: Run[MemberT], first_step: int) -> None:
        """Give the run's job the layout that the run's spec names. Return when the job has it.

        The first rank's call begins the change, and the calls of the other ranks wait for it.

        Raises:
            InvalidRequestError: the run names no layout, or another rank has given another `first_step`.
            ConflictError: see Engine.lay_out.
            StepAbortedError: a rank has gone.
        """
        if not run.spec.layout or first_step == 0:
            raise InvalidRequestError(
                f"layout {run.spec.layout!r} of OpenJob, first_step {first_step}: name the layout, and begin it with a "
                "later step than 0"
            )
        job = await asyncio.shield(run.job)
        run.check_whole()
        if run.layout is None:
            run.first_step = first_step
            run.layout = unlogged(asyncio.ensure_future(self._lay_out(run, job, first_step)))
        if run.first_step != first_step:
            raise InvalidRequestError(
                f"first_step {first_step} differs from that of the other ranks of this run, {run.first_step}"
            )
        await asyncio.shield(run.layout)

    async def _lay_out(self, run: Run[MemberT], job: Job, first_step: int) -> None:
        discarded = StepAbortedError(
            f"the step under way was discarded, because a rank of this run began another layout of job "
            f"{job.spec.name!r}; begin the layout on each rank before a step is prepared"
        )
        async with self._discarding_step(run, discarded):
            laid_out = await self._engine.lay_out(job, run.spec, first_step)
            run.job = asyncio.get_running_loop().create_future()
            run.job.set_result(laid_out)

    async def roll_back(self, run: Run[MemberT], step: int) -> None:
        """Make a committed step of the run's job the newest one again; see Engine.roll_back.

        A vote of other ranks ends with StepAbortedError, because the step that they vote for is discarded.

        Raises:
            StorageError: see Engine.roll_back.
        """
        job = await asyncio.shield(run.job)
        self._engine.check_roll_back(job, step)
        discarded = StepAbortedError(
            f"the step under way was discarded, because a rank of this run rolled job {job.spec.name!r} back to step "
            f"{step}; go on from that step"
        )
        async with self._discarding_step(run, discarded):
            await self._engine.roll_back(job, step)

    @asynccontextmanager
    async def _discarding_step(self, run: Run[MemberT], discarded: StepAbortedError) -> AsyncIterator[None]:
        """Let no vote for the step under way outlast the block, which discards the step.

        A commit for which all ranks have voted is finished first. A vote that outlasted the block would count for the
        step as it is prepared anew, which would be committed without the work of the rank that voted before.
        """
        if run.committing is not None:
            await asyncio.wait([run.committing])
        _end_vote(run, discarded)
        try:
            yield
        finally:
            # Ranks may have voted for the step while its work was being discarded, so their vote is ended here, too.
            _end_vote(run, discarded)

    async def register(self, run: Run[MemberT], job: Job, specs: Sequence[GroupSpec], limits: Sequence[Limit]) -> None:
        """Register groups of the run's job; see Engine.register. The run has a rank when this is called.

        Raises:
            NotFoundError: the last rank of the run has gone meanwhile.
            StorageError: see Engine.register.
        """
        registering = unlogged(asyncio.ensure_future(self._engine.register(job, specs, limits)))
        run.registering.add(registering)
        registering.add_done_callback(run.registering.discard)
        try:
            await asyncio.wait([registering])
        except asyncio.CancelledError:
            registering.cancel()
            raise
        if registering.cancelled():
            raise NotFoundError("the session ended while its groups were registered; open a new one")
        registering.result()

    async def vote(self, run: Run[MemberT], rank: int, step: int, client_state: bytes, settled: int) -> bool:
        """Vote for a step as one rank.

        Once all ranks have voted and the step is committed, return whether it is durable.

        Raises:
            ConflictError: `step` is not the next step, or another rank votes for another step, or ranks on other nodes
                may not have the newest step yet.
            StepAbortedError: a rank has gone.
            StorageError: an update of the step failed.
        """
        job = await asyncio.shield(run.job)
        run.check_whole()
        run.check_layout(job)
        # The number of the step is checked before the rank's vote is recorded, because a recorded vote for a wrong step
        # would keep the other ranks from voting for the right one.
        job.open_pending(step)
        _check_settled(run, job, rank, step, settled)
        if run.vote is None:
            run.vote = Vote(step, unlogged(asyncio.get_running_loop().create_future()))
        vote = run.vote
        if vote.step != step:
            raise ConflictError(f"rank {rank} votes for step {step} while other ranks vote for step {vote.step}")
        vote.client_states[rank] = client_state
        vote.settled = settled if vote.settled is None else min(vote.settled, settled)
        if len(vote.client_states) == run.spec.local_ranks and run.committing is None:
            run.committing = asyncio.ensure_future(self._commit(run, job, vote))
        return await asyncio.shield(vote.done)

    async def amend(self, run: Run[MemberT], rank: int, step: int, client_state: bytes) -> None:
        """Replace the client state that a rank has stored with the newest committed step; see Engine.amend."""
        job = await asyncio.shield(run.job)
        run.check_layout(job)
        await self._engine.amend(job, step, rank, client_state)

    async def settle(self, run: Run[MemberT], step: int, *, records: bool) -> None:
        """Take note that all ranks of a run, on all nodes, have committed a step; see Engine.settle.

        With `records`, the catalog names the step as settled when this returns.
        """
        job = await asyncio.shield(run.job)
        self._engine.settle(job, step)
        self.replicas.note_commit(job.spec.name, step)
        if records:
            await self._engine.record_settled(job)

    async def _commit(self, run: Run[MemberT], job: Job, vote: Vote) -> None:
        everywhere = run.spec.local_ranks == run.spec.world_size
        # A rank that votes for step 0 knows no settled step, but must send the number 0, because the field has no other
        # value for "none". So only a number below the step of the vote counts as a settled step.
        earlier = vote.settled if vote.settled is not None and vote.settled < vote.step else None
        settled = vote.step if everywhere else earlier
        # The commit is work for all ranks of the job. So its log lines name the job, and not the session whose vote
        # came last.
        unbind_contextvars("session")
        bind_contextvars(job=printable(job.spec.name), step=vote.step)
        try:
            durable = await self._engine.commit(job, vote.step, vote.client_states, settled)
        except StorageError as error:
            log.error("step %d of job %s was not committed: %s", vote.step, job.spec.name, error)
            self._events.add(EventKind.COMMIT, job.spec.name, f"step {vote.step} was not committed: {error}")
            vote.done.set_exception(error)
        except Exception as error:
            log.exception("step %d of job %s was not committed", vote.step, job.spec.name)
            failed = f"step {vote.step} was not committed: internal error ({type(error).__name__}); see the log"
            self._events.add(EventKind.COMMIT, job.spec.name, failed)
            vote.done.set_exception(error)
        else:
            how = "committed, durable" if durable else "committed, in memory"
            self._events.add(EventKind.COMMIT, job.spec.name, f"step {vote.step} was {how}")
            if everywhere:
                self.replicas.note_commit(job.spec.name, vote.step)
            vote.done.set_result(durable)
        finally:
            run.vote = None
            run.committing = None

    def leave(self, run: Run[MemberT], rank: int, *, is_closed: bool = False) -> None:
        """Remove a rank that has gone. From now on no further step of the run can be committed.

        Args:
            run: the run.
            rank: the rank.
            is_closed: whether the client has closed its session, and not lost it.
        """
        member = run.ranks.pop(rank)
        who = f"rank {rank} ({member.client})"
        run.broken_by = run.broken_by or who
        if is_closed:
            run.left_by = run.left_by or who
        # If ranks have voted for a step, their calls fail now: the rank that is gone cannot vote, and no new rank can
        # join this run. So the step cannot be committed.
        try:
            run.check_whole()
        except StepAbortedError as error:
            _end_vote(run, error)

    async def clean_up(self, run: Run[MemberT]) -> None:
        """Abandon the run's unfinished step and free the job's host memory, if the last rank of the run has gone.

        The run is forgotten if its job could not be opened, or is not in the store any more. If the job has no commit,
        it is kept with the run until MOST_EMPTY_JOBS other jobs without a commit were left by their ranks.
        """
        if run.ranks:
            return
        if run.layout is not None:
            await asyncio.wait([run.layout])
        await asyncio.wait([run.job])
        # Registrations of groups that are under way are cancelled, because they would take host memory for a job
        # without ranks.
        for registering in run.registering:
            registering.cancel()
        if run.registering:
            await asyncio.wait(set(run.registering))
        if run.committing is not None:
            await asyncio.wait([run.committing])
        name = run.spec.name
        if self._runs.get(name) is not run:
            return
        if not run.job.cancelled() and run.job.exception() is None:
            await self._end(run, run.job.result())
            if self._runs.get(name) is not run:
                return
            if (job := self._engine.jobs.by_name.get(name)) is not None:
                if job.newest is None and not self.is_copy(run):
                    await self._keep_empty(name)
                return
        del self._runs[name]

    async def _keep_empty(self, name: str) -> None:
        """Keep a job that has neither a commit nor ranks, and discard the oldest such jobs if there are too many."""
        self._empty.pop(name, None)
        self._empty[name] = None
        while len(self._empty) > MOST_EMPTY_JOBS:
            oldest = next(iter(self._empty))
            del self._empty[oldest]
            await self._discard_left(oldest)

    async def _discard_left(self, name: str) -> bool:
        """Discard the unfinished step of a job without ranks, and the job itself if it has no commit.

        Return False if the job has ranks or is not in the store, so that nothing was discarded.
        """
        job = self._engine.jobs.by_name.get(name)
        if job is None or self.ranks_of(name):
            return False
        await self._engine.end_run(job, forgets=True)
        if name not in self._engine.jobs.by_name:
            self.forget_job(name)
        return True

    async def _end(self, run: Run[MemberT], job: Job) -> None:
        is_copy = self.is_copy(run)
        if is_copy and run.left_by is None and self._can_go_on(job):
            job.spec = job.spec.without_ranks()
            self._copies.leave(run.spec.name)
            left = f"an unfinished copy stays for {UNFINISHED_SECONDS} s, so that another attempt can go on with it"
            self._events.add(EventKind.JOB, run.spec.name, left)
            return
        if is_copy:
            self._copies.end(run.spec.name)
        await self._engine.end_run(job, forgets=is_copy)
        left = "before its first commit" if job.newest is None else f"at step {job.newest}"
        self._events.add(EventKind.JOB, run.spec.name, f"the last rank left the job, {left}")

    def forget_job(self, job: str) -> None:
        """Forget the last run of a job that was deleted, unless a new run has begun, and the job's replicas."""
        if not self.ranks_of(job):
            self._runs.pop(job, None)
            self._empty.pop(job, None)
            self.replicas.forget(job)

    def _can_go_on(self, job: Job) -> bool:
        """Return whether another run could go on with the unfinished step of a copy into a job.

        No run could go on if the step belongs to a layout that is being filled beside the job's present one, because
        another run begins that layout anew. Nor could a run go on if some puts are only in host memory and wait for the
        seal, because it could not see which puts these are.
        """
        if job.pending is None or job.pending.abandoned or self._engine.jobs.by_name.get(job.spec.name) is not job:
            return False
        return job.newest is None or not job.tally.has_unbacked

    async def _end_copy(self, name: str) -> None:
        """Discard the unfinished step that a copy has left, unless a run uses the job."""
        if await self._discard_left(name):
            discarded = "the unfinished copy was discarded, because no attempt went on with it"
            self._events.add(EventKind.JOB, name, discarded)


def _is_gone(rank: str) -> StepAbortedError:
    return StepAbortedError(
        f"{rank} of this run is gone, so no further step can be committed; restart the run: it goes on from the last "
        "committed step"
    )


def _check_settled(run: Run[MemberT], job: Job, rank: int, step: int, settled: int) -> None:
    """Check that all ranks have the newest committed step, as far as the rank that votes for the next one knows.

    The store keeps every step that ranks on other nodes may not have replaced yet. Budgets and quotas have room for one
    such step beside the newest one, so a `settled_step` that never rose would use up the room of other jobs.

    Raises:
        ConflictError: ranks on other nodes may not have that step.
    """
    newest = 0 if job.newest is None else job.newest
    if run.spec.local_ranks < run.spec.world_size and settled < newest:
        raise ConflictError(
            f"rank {rank} votes for step {step} of job {job.spec.name!r} with settled_step {settled}, and the "
            f"newest step is {newest}; vote when all ranks on all nodes have committed that step, and pass it"
        )


def _end_vote(run: Run[MemberT], error: StepAbortedError) -> None:
    """End the vote under way with an error. The commit of a step for which all ranks have voted goes on."""
    if run.vote is not None and run.committing is None:
        run.vote.done.set_exception(error)
        run.vote = None
