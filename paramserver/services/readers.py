"""The calls of clients that read stored jobs and train nothing.

Such a client lists jobs and tensors, watches a job's steps as they are committed, and opens readers, each of which
holds one committed step. This module owns the count of readers that are being opened; an open reader belongs to its
session. It must never change a job, and must not cost anything while no step is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from paramserver.contract.capabilities import SETTLED_STEPS
from paramserver.rpc import convert
from paramserver.rpc.paging import PageStart, page_size
from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.sessions.leases import Lease
from paramserver.sessions.session import Session
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import DTYPE_TO_WIRE, KIND_TO_WIRE
from storage.base.errors import InvalidRequestError, NotFoundError
from storage.base.shard import Kind, ParameterSpec
from storage.base.slices import in_slices
from storage.base.waiting import first_of
from storage.engine import Engine
from storage.memory.gathering import Gathering
from storage.state.shard_index import Placed
from storage.state.versions import Job


class Readers:
    """The methods of ParameterStore for clients that read stored jobs. Such a client needs no run of a job."""

    def __init__(self, engine: Engine, sessions: Sessions, quotas: Quotas) -> None:
        self._engine = engine
        self._sessions = sessions
        self._quotas = quotas
        # The number of readers that are being opened, by job and by principal, so that quotas count them before they
        # are open.
        self._opening: Counter[str | Principal] = Counter()

    async def open(self, session: Session, request: pb.OpenReaderRequest) -> pb.OpenReaderResponse:
        """Open a reader, which holds a committed step for a session.

        Raises:
            NotFoundError: the step is not retained.
            BudgetExceededError: the job or the token has as many readers as its quota allows.
            StorageError: see `layout` and StepReaders.open.
        """
        unsettled = _wants_unsettled(session, request)
        job = self.layout(request, newest=unsettled or request.HasField("step"))
        step = convert.step(request.step, "step") if request.HasField("step") else None
        name = job.spec.name
        owner = session.owner
        self._quotas.of(name).check_readers(name, self._sessions.readers_of(name) + self._opening[name])
        held = self._sessions.readers_by(owner) + self._opening[owner]
        self._quotas.of_token(owner).check_readers(owner.name, held)
        self._opening.update((name, owner))
        try:
            reader = await self._engine.step_readers.open(job, step, unsettled=unsettled)
        finally:
            self._opening.subtract((name, owner))
        return pb.OpenReaderResponse(
            reader_id=self._sessions.add_reader(session, reader),
            step=reader.step,
            ranks=sorted(reader.record.client_states),
        )

    def layout(self, request: pb.OpenReaderRequest | pb.ListStoredTensorsRequest, *, newest: bool = False) -> Job:
        """Return the job in the layout that the request names, or the kept step that it names.

        If the request names neither, return the job in the layout of the newest settled step. With `newest`, or if no
        step is settled, return it in the layout of the newest committed step.

        Raises:
            InvalidRequestError: the request names a kept step, and a layout or another step as well.
            NotFoundError: there is no such job, or it has no such kept step, or no such layout with committed steps.
        """
        if request.HasField("kept"):
            if request.HasField("layout") or (isinstance(request, pb.OpenReaderRequest) and request.HasField("step")):
                raise InvalidRequestError("a kept step has one layout and one step: name neither beside it")
            return self._engine.kept_steps.find(request.job, request.kept)
        if not request.HasField("layout"):
            return self._engine.jobs.job(request.job) if newest else self._engine.jobs.settled_layout(request.job)
        for other in self._engine.jobs.layouts(request.job):
            if other.spec.layout == request.layout and other.newest is not None:
                return other
        raise NotFoundError(f"job {request.job!r} has no layout {request.layout!r} with committed steps")

    async def acquire(self, session: Session, want: pb.AcquireLeasesRequest.Want) -> Lease:
        """Lease one range of a reader's step, or many ranges of one reader's step.

        Raises:
            InvalidRequestError: the want also names a slab, or both one range and several, or does not ask to read.
            NotFoundError: the session has no such reader, or this store does not have all elements of the ranges.
            StorageError: see StepReaders.load.
        """
        if want.HasField("slab") or want.mode != pb.LEASE_MODE_READ:
            raise InvalidRequestError("a range is leased for reading, and instead of a slab")
        if not want.ranges:
            return await self._acquire_one(session, want.range)
        if want.HasField("range"):
            raise InvalidRequestError("a want has either one range or several ranges")
        return await self._acquire_many(session, want.ranges)

    async def _acquire_one(self, session: Session, source: pb.TensorRange) -> Lease:
        reader, kind = session.reader(source.reader_id), convert.kind(source.kind)
        convert.check_range(source)
        dtype = await reader.describe(source.fqn, kind, source.offset, source.numel)
        nbytes = source.numel * dtype.itemsize

        async def fill(view: memoryview) -> None:
            await reader.fill(source.fqn, kind, source.offset, source.numel, view)

        return await self._sessions.grants.acquire_range(
            session, source.reader_id, reader, source.fqn, convert.tensor_range(source), dtype, nbytes, fill
        )

    async def _acquire_many(self, session: Session, sources: Sequence[pb.TensorRange]) -> Lease:
        """Lease several ranges of one reader's step together; in the arena their bytes lie one behind the other."""
        reader_id = sources[0].reader_id
        reader = session.reader(reader_id)
        ranges = []
        async for source in in_slices(convert.batch(sources, "wants.ranges")):
            if source.reader_id != reader_id:
                raise InvalidRequestError(
                    f"ranges of readers {reader_id} and {source.reader_id} cannot share a lease; ask for two"
                )
            ranges.append(convert.tensor_range(source))
        gathering = await Gathering.of(reader.job, ranges)

        async def fill(view: memoryview) -> None:
            await reader.gather(gathering, view)

        name = f"{len(ranges)} ranges"
        return await self._sessions.grants.acquire_range(
            session, reader_id, reader, name, tuple(ranges), gathering.dtype, gathering.nbytes, fill
        )

    async def list_tensors(self, job: Job, request: pb.ListStoredTensorsRequest) -> pb.ListStoredTensorsResponse:
        """Return one page of the tensors of which this store holds elements.

        Raises:
            InvalidRequestError: the page is too large, or its token was not given out by a store.
        """
        size, start = page_size(request.page_size), PageStart.of_token(request.page_token)
        tensors: list[pb.StoredTensor] = []
        async for fqn in in_slices(job.index.names_from(start.fqn, request.fqn_prefix)):
            if len(tensors) == size:
                return pb.ListStoredTensorsResponse(tensors=tensors, next_page_token=PageStart(fqn).to_token())
            if (parameter := job.spec.model.by_name.get(fqn)) is not None:
                index = job.spec.model.index_by_name[fqn]
                tensors.append(_describe_tensor(parameter, index, job.index.of(fqn)))
        return pb.ListStoredTensorsResponse(tensors=tensors)

    async def watch(self, session: Session, request: pb.WatchJobRequest) -> AsyncIterator[pb.WatchJobResponse]:
        """Yield the newest settled step now, and each later one when it is settled.

        If the request asks for unsettled steps, yield the newest committed step of this store in the same way. A client
        that is slow to take a step gets the newest one next, not each step between the two.

        Raises:
            NotFoundError: there is no such job, it was deleted, or the session has ended.
        """
        name, unsettled = request.job, _wants_unsettled(session, request)
        job = self._engine.jobs.job(name)
        last: tuple[int, float] | None = None
        while True:
            # The job's event of the next commit is taken before the job's newest step is read. So a commit that happens
            # while the client takes a step from the stream sets this event, and WatchJob does not miss it.
            changed = job.changed
            shown = job if unsettled else self._engine.jobs.settled_layout(name)
            step = shown.newest if unsettled else shown.settled_step
            if step is not None and last != (found := (step, shown.retained[step].committed_at)):
                last = found
                yield pb.WatchJobResponse(newest=version_info(shown, step))
            await first_of(changed, session.ended)
            self._sessions.get(session.session_id)
            while job.successor is not None and job.successor.newest is not None:
                job = job.successor
            current = self._engine.jobs.by_name.get(name)
            if current is None or (current is not job and job.newest is not None):
                raise NotFoundError(f"job {name!r} was deleted")
            # When the next run opens a job without any commit, the engine replaces its job object. So the watch goes on
            # with the object that the engine has now.
            job = current


def describe_layouts(layouts: Iterable[Job]) -> list[pb.StoredLayout]:
    """Return the layouts of a job that have committed steps, oldest first."""
    return [
        pb.StoredLayout(
            layout=job.spec.layout,
            world_size=job.spec.world_size,
            steps=sorted(job.retained),
            rolled_back=[pb.RolledBack(step=mark.step, name=mark.name) for mark in job.rolled_back],
        )
        for job in layouts
        if job.retained
    ]


def describe_job(job: Job, layouts: Iterable[Job]) -> pb.StoredJob:
    """Return the description of a job that the daemon sends to clients that may read the job."""
    layouts = list(layouts)
    description = pb.StoredJob(
        layouts=describe_layouts(layouts),
        name=job.spec.name,
        world_size=job.spec.world_size,
        committed_step=job.newest,
        durable=job.newest in job.durable,
        unsettled=job.newest != job.settled_step,
    )
    settled = [layout for layout in layouts if layout.settled_step is not None]
    if description.unsettled and settled:
        step = settled[-1].settled_step
        assert step is not None
        description.settled.CopyFrom(version_info(settled[-1], step))
    return description


def _wants_unsettled(session: Session, request: pb.OpenReaderRequest | pb.WatchJobRequest) -> bool:
    """Return whether a client wants the newest step of this store, although other nodes may lack it.

    Clients of earlier releases get that step without asking, because their followers copy each step before the trainers
    settle it.
    """
    return request.unsettled or SETTLED_STEPS not in session.capabilities


def version_info(job: Job, step: int) -> pb.VersionInfo:
    """Return the message for a committed step of a job."""
    return pb.VersionInfo(
        step=step, durable=step in job.durable, committed_at_unix_seconds=job.retained[step].committed_at
    )


def _describe_tensor(parameter: ParameterSpec, index: int, placed: Sequence[Placed]) -> pb.StoredTensor:
    held = ((shard.offset, shard.offset + shard.numel) for shard, _ in placed)
    return pb.StoredTensor(
        parameter=convert.parameter_to_wire(parameter),
        kinds=[
            pb.StoredTensor.KindDType(kind=KIND_TO_WIRE[slab.kind], dtype=DTYPE_TO_WIRE[slab.dtype])
            for slab in placed[0].group.spec.slabs
            if slab.kind is not Kind.GRAD
        ],
        held=[pb.StoredTensor.ElementRange(offset=start, numel=end - start) for start, end in _joined(held)],
        index=index,
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges `[start, end)` in ascending order, with those that touch or overlap joined into one."""
    joined: tuple[int, int] | None = None
    for start, end in ranges:
        if joined is not None and start <= joined[1]:
            joined = joined[0], max(joined[1], end)
            continue
        if joined is not None:
            yield joined
        joined = start, end
    if joined is not None:
        yield joined
