"""The ParameterStore service: converts and checks requests, calls the sessions and the engine, and answers.

This module owns the count of jobs that are being opened, and nothing else. It must never decide what becomes of a
lease: that is the work of sessions/grants.py and sessions/gradient_updates.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from paramserver.dataplane.lending import Lending
from paramserver.dataplane.raw_stream import RawContext
from paramserver.dataplane.read_write import ReadWrite
from paramserver.rpc import convert
from paramserver.rpc.rights import Right, needs
from paramserver.rpc.status import finished
from paramserver.security.gate import Context, check_job
from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.services.access import Access
from paramserver.services.readers import Readers, describe_job, describe_layouts, version_info
from paramserver.services.step_description import describe_step
from paramserver.services.tracing import Traces, read_counters
from paramserver.sessions.host_quota import limits_of
from paramserver.sessions.leases import DeviceLease, Lease
from paramserver.sessions.service import SessionService
from paramserver.sessions.session import Session as ClientSession
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import InvalidRequestError
from storage.base.shard import Kind
from storage.base.slices import in_slices
from storage.engine import Engine
from storage.state.slab import NEVER
from storage.tiers.gpu import DeviceRange


class ParameterStore:
    """The methods of ParameterStore; parameter_store.proto says what each of them does."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        session_service: SessionService,
        streams: ReadWrite,
        lending: Lending,
        access: Access,
        quotas: Quotas,
        traces: Traces,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._session_service = session_service
        self._streams = streams
        self._lending = lending
        self._access = access
        self._quotas = quotas
        self._traces = traces
        self._grants = sessions.grants
        self._updates = sessions.updates
        # The number of OpenJob calls under way for each job. A job that is being opened counts in its token's quota,
        # although the engine may not have it yet.
        self._opening: Counter[str] = Counter()
        self._readers = Readers(engine, sessions, quotas)

    @needs(Right.TOKEN, takes_context=True)
    async def Session(self, requests: AsyncIterator[pb.SessionRequest], principal: Principal, context: Context) -> None:
        await self._session_service.serve(requests, principal, context)

    @needs(Right.SESSION, takes_context=True)
    async def OpenJob(self, request: pb.OpenJobRequest, session: ClientSession, context: Context) -> pb.OpenJobResponse:
        check_job(session.owner, request.job)
        if request.resume not in (pb.RESUME_POLICY_AUTO, pb.RESUME_POLICY_NEVER, pb.RESUME_POLICY_MUST):
            raise InvalidRequestError(f"resume has the value {request.resume}; allowed are AUTO, NEVER and MUST")
        run_id = convert.name(request.run_id, "run_id")
        # A thread converts the request to the job's description. That takes tenths of a second for a large model, and
        # on the event loop all other clients would wait meanwhile.
        spec = await asyncio.to_thread(convert.job_spec, request)
        # While the thread converted the job, the session may have ended and the token may have been withdrawn, so both
        # are checked again.
        session = self._access.session(request.session_id, context)
        self._check_jobs(session.owner, spec.name)
        self._opening[spec.name] += 1
        try:
            job = await self._sessions.join(
                session,
                spec,
                run_id,
                request.rank,
                may_exist=request.resume != pb.RESUME_POLICY_NEVER,
                must_exist=request.resume == pb.RESUME_POLICY_MUST,
                comes_back=request.comes_back,
            )
        finally:
            self._opening[spec.name] -= 1
            if not self._opening[spec.name]:
                del self._opening[spec.name]
        return pb.OpenJobResponse(
            committed=[
                pb.CommittedStep(step=step, client_state=job.retained[step].client_states.get(session.rank, b""))
                for step in self._engine.steps_to_return_to(job)
            ],
            layouts=describe_layouts(self._engine.jobs.layouts(job.spec.name)),
        )

    def _check_jobs(self, owner: Principal, name: str) -> None:
        """If the job is new, check that the token's quota allows one more job.

        A job that its ranks left without a commit does not count any more, and is new again. If it counted, a token
        without the right to delete jobs could not make room for another one.

        Raises:
            BudgetExceededError: the token has as many jobs as its quota allows.
        """
        quota = self._quotas.of_token(owner)
        known = (self._engine.jobs.by_name.keys() - self._sessions.empty_jobs) | self._opening.keys()
        if quota.jobs is not None and name not in known:
            quota.check_jobs(owner.name, sum(map(owner.allows, known)))

    @needs(Right.SESSION)
    async def BeginLayout(self, request: pb.BeginLayoutRequest, session: ClientSession) -> pb.BeginLayoutResponse:
        await self._sessions.begin_layout(session, convert.step(request.first_step, "first_step"))
        return pb.BeginLayoutResponse()

    @needs(Right.SESSION)
    async def RegisterShards(
        self, request: pb.RegisterShardsRequest, session: ClientSession
    ) -> pb.RegisterShardsResponse:
        job = await session.job()
        session.require_run().check_layout(job)
        limits = limits_of(self._quotas, session.owner, job.spec.name)
        specs = await asyncio.to_thread(convert.group_specs, job.spec, request.groups)
        await self._sessions.register(session, job, specs, limits)
        return pb.RegisterShardsResponse()

    @needs(Right.SESSION)
    async def Prefetch(self, request: pb.PrefetchRequest, session: ClientSession) -> pb.PrefetchResponse:
        job = await session.job()
        wants = [
            (want.slab.group, convert.kind(want.slab.kind), convert.position(want.position, "wants.position"))
            async for want in in_slices(convert.batch(request.wants, "wants"))
        ]
        # The session may have ended while its wants were converted. If the engine got a window of an ended session, the
        # window would never leave it, so the session is checked again.
        self._sessions.get(session.session_id)
        # Slabs with a copy on the session's device are left out of the window, because the session reads them there and
        # they need not be prefetched into host memory.
        copies = self._grants.device_copies
        wants = [want for want in wants if not copies.has(session, job, want[0], want[1])]
        self._engine.pins.prefetch(session.session_id, job, wants)
        fetched = self._engine.queue.fetched(job.spec.name)
        return pb.PrefetchResponse(fetched_bytes=fetched.nbytes, fetch_seconds=fetched.seconds)

    @needs(Right.SESSION)
    async def AcquireLeases(self, request: pb.AcquireLeasesRequest, session: ClientSession) -> pb.AcquireLeasesResponse:
        granted: list[Lease | DeviceLease] = []
        asked_at = time.monotonic()
        try:
            async for want in in_slices(convert.batch(request.wants, "wants")):
                granted.append(await self._acquire(session, want))
        except BaseException:
            # A failed AcquireLeases releases the leases that it has granted so far, and a cancellation does not stop
            # that. The client has not received the numbers of these leases, so it could not release them itself.
            await finished(self._release_all(session, granted))
            raise
        return pb.AcquireLeasesResponse(leases=[_lease_to_wire(lease, asked_at) for lease in granted])

    async def _release_all(self, session: ClientSession, leases: Sequence[Lease | DeviceLease]) -> None:
        async for lease in in_slices(leases):
            if isinstance(lease, DeviceLease):
                if lease.lease_id in session.device_leases:
                    self._grants.device_copies.release(session, lease)
            elif lease.parkable is not None and lease.recalls:
                # This lease of a gradient or an activation is older than the failed call, which has only recalled its
                # bytes. So the lease is not released: the bytes are parked again.
                self._engine.gradients.park(lease.parkable)
            elif not lease.void:
                await self._grants.release(session, lease, publish=False, next_use=NEVER)

    async def _acquire(self, session: ClientSession, want: pb.AcquireLeasesRequest.Want) -> Lease | DeviceLease:
        if want.HasField("range") or want.ranges:
            return await self._readers.acquire(session, want)
        if want.HasField("activation"):
            return await self._grants.acquire_activation(session, want.activation)
        return await self._grants.acquire(session, want)

    @needs(Right.SESSION)
    async def ReleaseLeases(self, request: pb.ReleaseLeasesRequest, session: ClientSession) -> pb.ReleaseLeasesResponse:
        for release in convert.batch(request.releases, "releases"):
            next_use = convert.position(release.next_use, "next_use") if release.HasField("next_use") else NEVER
            if (on_device := session.device_leases.get(release.lease_id)) is not None:
                self._grants.device_copies.release(session, on_device)
                continue
            lease = session.lease(release.lease_id)
            # A publication is finished even if the call is cancelled, because the lease has ended by then and the
            # client could not repeat the release.
            await finished(
                self._grants.release(session, lease, publish=release.publish, next_use=next_use, is_kept=release.kept)
            )
        return pb.ReleaseLeasesResponse()

    @needs(Right.SESSION)
    async def OfferDeviceMemory(
        self, request: pb.OfferDeviceMemoryRequest, session: ClientSession
    ) -> pb.OfferDeviceMemoryResponse:
        device = convert.name(request.device, "device")
        await self._grants.device_copies.offer(session, device, convert.device_bytes(request.size_bytes))
        return pb.OfferDeviceMemoryResponse()

    @needs(Right.TOKEN, takes_context=True, is_raw=True)
    async def Read(self, _: AsyncIterator[bytes], __: Principal, context: RawContext) -> None:
        # This method gets no session: rpc/checked_server.py has checked the token only, because the session is named in
        # the stream's first message. `ReadWrite` checks the caller's right to that session.
        await self._streams.read(lambda session_id: self._access.session(session_id, context), context)

    @needs(Right.TOKEN, takes_context=True, is_raw=True)
    async def Write(self, _: AsyncIterator[bytes], __: Principal, context: RawContext) -> None:
        await self._streams.write(lambda session_id: self._access.session(session_id, context), context)

    @needs(Right.BORROWER, takes_context=True)
    async def BorrowMemory(
        self, requests: AsyncIterator[pb.BorrowMemoryRequest], principal: Principal, context: Context
    ) -> None:
        await self._lending.borrow(requests, principal, context)

    @needs(Right.BORROWER, takes_context=True, is_raw=True)
    async def AccessLoan(self, _: AsyncIterator[bytes], principal: Principal, context: RawContext) -> None:
        await self._lending.access(principal, context)

    @needs(Right.SESSION)
    async def ApplyGradients(
        self, request: pb.ApplyGradientsRequest, session: ClientSession
    ) -> pb.ApplyGradientsResponse:
        await self._updates.apply_gradients(session, request)
        return pb.ApplyGradientsResponse()

    @needs(Right.SESSION)
    async def WithdrawUpdates(
        self, request: pb.WithdrawUpdatesRequest, session: ClientSession
    ) -> pb.WithdrawUpdatesResponse:
        step = convert.step(request.step, "step")
        for group in convert.batch(request.groups, "groups"):
            # The withdrawal of an early update is finished even if the client goes, because no rank could go on from an
            # update that is half undone.
            await finished(self._updates.withdraw(session, step, group))
        return pb.WithdrawUpdatesResponse()

    @needs(Right.SESSION)
    async def ParkGradients(self, request: pb.ParkGradientsRequest, session: ClientSession) -> pb.ParkGradientsResponse:
        self._grants.park(session, convert.batch(request.lease_ids, "lease_ids"))
        return pb.ParkGradientsResponse()

    @needs(Right.SESSION)
    async def CommitStep(self, request: pb.CommitStepRequest, session: ClientSession) -> pb.CommitStepResponse:
        if request.settled_step > request.step:
            raise InvalidRequestError(f"settled_step {request.settled_step} is above step {request.step}")
        durable = await self._sessions.vote(
            session,
            convert.step(request.step, "step"),
            convert.client_state(request.client_state),
            request.settled_step,
        )
        return pb.CommitStepResponse(durable=durable)

    @needs(Right.SESSION)
    async def SettleStep(self, request: pb.SettleStepRequest, session: ClientSession) -> pb.SettleStepResponse:
        await self._sessions.settle(session, convert.step(request.step, "step"), records=request.record)
        return pb.SettleStepResponse()

    @needs(Right.SESSION)
    async def AmendStep(self, request: pb.AmendStepRequest, session: ClientSession) -> pb.AmendStepResponse:
        step, state = convert.step(request.step, "step"), convert.client_state(request.client_state)
        # The change of a client state is finished even if the client goes, so that memory and catalog have the same
        # client state.
        await finished(self._sessions.amend(session, step, state))
        return pb.AmendStepResponse()

    @needs(Right.SESSION)
    async def RollBack(self, request: pb.RollBackRequest, session: ClientSession) -> pb.RollBackResponse:
        # A roll-back is finished even if the client goes, because a job that is half rolled back would have bytes of
        # two steps.
        await finished(self._sessions.roll_back(session, convert.step(request.step, "step")))
        return pb.RollBackResponse()

    @needs(Right.SESSION)
    async def ListVersions(self, request: pb.ListVersionsRequest, session: ClientSession) -> pb.ListVersionsResponse:
        job = await session.job()
        return pb.ListVersionsResponse(versions=[version_info(job, step) for step in sorted(job.retained)])

    @needs(Right.SESSION)
    async def OpenReader(self, request: pb.OpenReaderRequest, session: ClientSession) -> pb.OpenReaderResponse:
        check_job(session.owner, request.job)
        return await self._readers.open(session, request)

    @needs(Right.SESSION)
    async def ReadClientState(
        self, request: pb.ReadClientStateRequest, session: ClientSession
    ) -> pb.ReadClientStateResponse:
        reader = session.reader(request.reader_id)
        return pb.ReadClientStateResponse(client_state=reader.client_state(request.rank))

    @needs(Right.SESSION)
    async def DescribeStep(
        self, request: pb.DescribeStepRequest, session: ClientSession
    ) -> AsyncIterator[pb.DescribeStepResponse]:
        async for response in describe_step(session.reader(request.reader_id)):
            yield response

    @needs(Right.SESSION)
    async def DigestSlabs(self, request: pb.DigestSlabsRequest, session: ClientSession) -> pb.DigestSlabsResponse:
        read: Callable[[str, Kind], Awaitable[tuple[int | None, bytes]]]
        if request.reader_id:
            read = session.reader(request.reader_id).digest
        else:
            read = partial(self._engine.reader.digest, await session.job())
        response = pb.DigestSlabsResponse()
        # The daemon reads each slab once, because a request that names one slab thousands of times would otherwise keep
        # the daemon busy for seconds.
        found: dict[tuple[str, Kind], tuple[int | None, bytes]] = {}
        for name in convert.batch(request.slabs, "slabs"):
            slab = (name.group, convert.kind(name.kind))
            if slab not in found:
                found[slab] = await read(*slab)
            version, digest = found[slab]
            response.slabs.append(pb.DigestSlabsResponse.SlabDigest(digest=digest, version=version))
        return response

    @needs(Right.SESSION)
    async def CloseReader(self, request: pb.CloseReaderRequest, session: ClientSession) -> pb.CloseReaderResponse:
        self._sessions.close_reader(session, request.reader_id)
        return pb.CloseReaderResponse()

    @needs(Right.SESSION)
    async def ListStoredJobs(
        self, request: pb.ListStoredJobsRequest, session: ClientSession
    ) -> pb.ListStoredJobsResponse:
        allowed = (job for name, job in self._engine.jobs.by_name.items() if session.owner.allows(name))
        jobs = sorted(allowed, key=lambda job: job.spec.name)
        return pb.ListStoredJobsResponse(
            jobs=[describe_job(job, self._engine.jobs.layouts(job.spec.name)) for job in jobs]
        )

    @needs(Right.SESSION)
    async def ListStoredTensors(
        self, request: pb.ListStoredTensorsRequest, session: ClientSession
    ) -> pb.ListStoredTensorsResponse:
        check_job(session.owner, request.job)
        return await self._readers.list_tensors(self._readers.layout(request), request)

    @needs(Right.SESSION)
    async def WatchJob(self, request: pb.WatchJobRequest, session: ClientSession) -> AsyncIterator[pb.WatchJobResponse]:
        check_job(session.owner, request.job)
        async for response in self._readers.watch(session, request):
            yield response

    @needs(Right.SESSION)
    async def ReadCounters(self, _: pb.ReadCountersRequest, __: ClientSession) -> pb.ReadCountersResponse:
        return read_counters(self._engine)

    @needs(Right.SESSION)
    async def CollectSpans(self, request: pb.CollectSpansRequest, session: ClientSession) -> pb.CollectSpansResponse:
        job = await session.job()
        # The session may have ended while this call waited for the job. The collection of spans of an ended session
        # would never be removed, so the session is checked again.
        self._sessions.get(session.session_id)
        return self._traces.collect(session.session_id, job.spec.identity, ends=request.ends)


def _lease_to_wire(lease: Lease | DeviceLease, asked_at: float) -> pb.Lease:
    if isinstance(lease, DeviceLease):
        return pb.Lease(
            lease_id=lease.lease_id,
            version=lease.version,
            size_bytes=lease.range_.nbytes,
            device=_range_to_wire(lease.range_),
        )
    version = lease.pin.copy.step if lease.pin is not None else lease.step
    return pb.Lease(
        lease_id=lease.lease_id,
        version=version or 0,
        arena_offset=lease.arena_range.offset,
        size_bytes=lease.nbytes,
        generation=lease.arena_range.generation,
        update_wait_seconds=0.0 if lease.pin is None else max(0.0, lease.pin.slab.updated_at - asked_at),
        keep=None if lease.keep is None else _range_to_wire(lease.keep),
        park=lease.asks_to_park,
    )


def _range_to_wire(range_: DeviceRange) -> pb.DeviceRange:
    return pb.DeviceRange(offset=range_.offset, generation=range_.generation)
