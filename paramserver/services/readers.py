"""What is stored, for clients that train nothing: which jobs and tensors there are, their steps as they are committed,
and readers that hold one of them.

Owns nothing: readers belong to their sessions. Must never change a job, nor cost anything while nothing is committed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

from paramserver.rpc import convert
from paramserver.rpc.paging import Place, page_size
from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.sessions.host_quota import HostQuota
from paramserver.sessions.leases import Lease
from paramserver.sessions.sessions import Session, Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import DTYPE_TO_WIRE, KIND_TO_WIRE
from storage.engine import Engine
from storage.errors import InvalidRequestError, NotFoundError
from storage.gathering import Gathering
from storage.reader import StepReader
from storage.shard import DType, Kind, ParameterSpec
from storage.shard_index import Placed
from storage.slices import in_slices
from storage.tiers.base import round_up
from storage.versions import Job


class Readers:
    """The calls of ParameterStore that need no run."""

    def __init__(self, engine: Engine, sessions: Sessions, quotas: Quotas, host_quota: HostQuota) -> None:
        self._engine = engine
        self._sessions = sessions
        self._quotas = quotas
        self._host_quota = host_quota
        # Readers that are being opened, by job and by principal.
        self._opening: Counter[str | Principal] = Counter()

    async def open(self, session: Session, job: Job, request: pb.OpenReaderRequest) -> pb.OpenReaderResponse:
        """Holds a committed step for a session.

        Raises:
            NotFoundError: the step is not retained.
            BudgetExceededError: the quota of the job or the token has no reader left.
            StorageError: see Engine.open_reader.
        """
        step = convert.step(request.step, "step") if request.HasField("step") else None
        name = job.spec.name
        owner = session.owner
        self._quotas.of(name).check_readers(name, self._sessions.readers_of(name) + self._opening[name])
        held = self._sessions.readers_by(owner) + self._opening[owner]
        self._quotas.of_token(owner).check_readers(owner.name, held)
        self._opening.update((name, owner))
        try:
            reader = await self._engine.open_reader(job, step)
        finally:
            self._opening.subtract((name, owner))
        return pb.OpenReaderResponse(reader_id=self._sessions.hold(session, reader), step=reader.step)

    def layout(self, request: pb.OpenReaderRequest | pb.ListStoredTensorsRequest) -> Job:
        """The job in the layout that is asked for. Raises NotFoundError where there is none such."""
        job = self._engine.job(request.job)
        if not request.HasField("layout"):
            return job
        for other in self._engine.layouts(request.job):
            if other.spec.layout == request.layout and other.newest is not None:
                return other
        raise NotFoundError(f"job {request.job!r} has no layout {request.layout!r} with committed steps")

    async def lease(self, session: Session, source: pb.TensorRange) -> Lease:
        """A lease on a range of a reader's step, which is brought into the arena for it.

        Raises:
            NotFoundError: the session has no such reader, or this store does not have all of the range.
            StorageError: see Engine.load.
        """
        reader, kind = session.reader(source.reader_id), convert.kind(source.kind)
        convert.check_range(source)
        dtype = await reader.describe(source.fqn, kind, source.offset, source.numel)
        nbytes = source.numel * dtype.itemsize

        async def fill(view: memoryview) -> None:
            await reader.fill(source.fqn, kind, source.offset, source.numel, view)

        return await self._load(session, source.reader_id, reader, source.fqn, dtype, nbytes, fill)

    async def lease_many(self, session: Session, sources: Sequence[pb.TensorRange]) -> Lease:
        """A lease on many ranges of one reader's step, which are brought into the arena for it, side by side.

        Raises:
            InvalidRequestError: they are of several readers, or too many.
            NotFoundError: the session has no such reader, or this store does not have all of the ranges.
            StorageError: see Engine.load.
        """
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
        return await self._load(session, reader_id, reader, name, gathering.dtype, gathering.nbytes, fill)

    async def _load(
        self,
        session: Session,
        reader_id: int,
        reader: StepReader,
        name: str,
        dtype: DType,
        nbytes: int,
        fill: Callable[[memoryview], Awaitable[None]],
    ) -> Lease:
        """Lease bytes of a reader's step that `fill` brings into the arena."""
        async with self._host_quota.room_for(session.owner, reader.job, round_up(nbytes)):
            region = await self._engine.load(reader.job, nbytes, fill)
            if session.readers.get(reader_id) is not reader:
                self._engine.scratch.free(region)
                raise NotFoundError(f"reader {reader_id} was closed while a range was leased from it")
            return self._sessions.lease_range(session, reader, name, dtype, nbytes, region)

    async def list_tensors(self, job: Job, request: pb.ListStoredTensorsRequest) -> pb.ListStoredTensorsResponse:
        """A page of the tensors that this store holds elements of.

        Raises:
            InvalidRequestError: the page's size or token is none.
        """
        size, start = page_size(request.page_size), Place.of_token(request.page_token)
        tensors: list[pb.StoredTensor] = []
        async for fqn in in_slices(job.index.names_from(start.fqn, request.fqn_prefix)):
            if len(tensors) == size:
                return pb.ListStoredTensorsResponse(tensors=tensors, next_page_token=Place(fqn).to_token())
            if (parameter := job.spec.model.by_name.get(fqn)) is not None:
                tensors.append(_describe_tensor(parameter, job.index.of(fqn)))
        return pb.ListStoredTensorsResponse(tensors=tensors)

    async def watch(self, session: Session, job: Job) -> AsyncIterator[pb.WatchJobResponse]:
        """The newest committed step, then the newest again whenever one was committed.

        Raises:
            NotFoundError: the job was deleted, or the session has ended.
        """
        name = job.spec.name
        while True:
            # Before the step is looked at: none that is committed while the client takes this one may be missed.
            changed = job.changed
            if job.newest is not None:
                yield pb.WatchJobResponse(newest=version_info(job, job.newest))
            await _either(changed, session.ended)
            self._sessions.get(session.session_id)
            while job.successor is not None and job.successor.newest is not None:
                job = job.successor
            current = self._engine.jobs.get(name)
            if current is None or (current is not job and job.newest is not None):
                raise NotFoundError(f"job {name!r} was deleted")
            # A job that never committed anything is made anew by its next run.
            job = current


async def _either(*events: asyncio.Event) -> None:
    """Waits for the first of several events."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in waiting:
            future.cancel()


def describe_layouts(layouts: Iterable[Job]) -> list[pb.StoredLayout]:
    """Those of a job that have commits, oldest first."""
    return [
        pb.StoredLayout(layout=job.spec.layout, world_size=job.spec.world_size, steps=sorted(job.retained))
        for job in layouts
        if job.retained
    ]


def describe_job(job: Job, layouts: Iterable[Job]) -> pb.StoredJob:
    """A job, for those who may read it."""
    return pb.StoredJob(
        layouts=describe_layouts(layouts),
        name=job.spec.name,
        world_size=job.spec.world_size,
        committed_step=job.newest,
        durable=job.newest in job.durable,
    )


def version_info(job: Job, step: int) -> pb.VersionInfo:
    """A committed step of a job."""
    return pb.VersionInfo(
        step=step, durable=step in job.durable, committed_at_unix_seconds=job.retained[step].committed_at
    )


def _describe_tensor(parameter: ParameterSpec, placed: Sequence[Placed]) -> pb.StoredTensor:
    held = ((shard.offset, shard.offset + shard.numel) for shard, _ in placed)
    return pb.StoredTensor(
        parameter=convert.parameter_to_wire(parameter),
        kinds=[
            pb.StoredTensor.KindDType(kind=KIND_TO_WIRE[slab.kind], dtype=DTYPE_TO_WIRE[slab.dtype])
            for slab in placed[0].group.spec.slabs
            if slab.kind is not Kind.GRAD
        ],
        held=[pb.StoredTensor.ElementRange(offset=start, numel=end - start) for start, end in _joined(held)],
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ascending ranges `[start, end)`, joined where they touch or overlap."""
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
