"""The ParameterStore service: checks requests, calls sessions and engine, answers. Keeps no state of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from paramserver import streams, wire
from paramserver.leases import Lease
from paramserver.session_service import SessionService
from paramserver.sessions import Session as ClientSession
from paramserver.sessions import Sessions
from paramserver.status import answering_errors
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from storage.engine import Engine
from storage.errors import ConflictError, InvalidRequestError
from storage.shard import Kind
from storage.slab import NEVER


class ParameterStore(pb_grpc.ParameterStoreServicer):
    """See parameter_store.proto for what each call does."""

    def __init__(self, engine: Engine, sessions: Sessions, session_service: SessionService) -> None:
        self._engine = engine
        self._sessions = sessions
        self._session_service = session_service

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],
    ) -> None:
        async with answering_errors(context):
            await self._session_service.serve(request_iterator, context)

    def _session(self, session_id: str, context: grpc.aio.ServicerContext[Any, Any]) -> ClientSession:
        """The caller's session; raises NotFoundError where it is none of the caller's."""
        return self._sessions.get(session_id)

    async def OpenJob(
        self, request: pb.OpenJobRequest, context: grpc.aio.ServicerContext[pb.OpenJobRequest, pb.OpenJobResponse]
    ) -> pb.OpenJobResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            if request.resume not in (pb.RESUME_POLICY_AUTO, pb.RESUME_POLICY_NEVER, pb.RESUME_POLICY_MUST):
                raise InvalidRequestError(f"resume has the value {request.resume}; allowed are AUTO, NEVER and MUST")
            job = await self._sessions.join(
                session,
                wire.job_spec(request),
                wire.name(request.run_id, "run_id"),
                request.rank,
                may_exist=request.resume != pb.RESUME_POLICY_NEVER,
                must_exist=request.resume == pb.RESUME_POLICY_MUST,
            )
            return pb.OpenJobResponse(
                committed=[
                    pb.CommittedStep(step=step, client_state=commit.client_states.get(session.rank, b""))
                    for step, commit in sorted(job.retained.items())
                ]
            )

    async def RegisterShards(
        self,
        request: pb.RegisterShardsRequest,
        context: grpc.aio.ServicerContext[pb.RegisterShardsRequest, pb.RegisterShardsResponse],
    ) -> pb.RegisterShardsResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            await self._engine.register(await session.job(), [wire.group_spec(group) for group in request.groups])
            return pb.RegisterShardsResponse()

    async def Prefetch(
        self, request: pb.PrefetchRequest, context: grpc.aio.ServicerContext[pb.PrefetchRequest, pb.PrefetchResponse]
    ) -> pb.PrefetchResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            job = await session.job()
            wants = [(want.slab.group, wire.kind(want.slab.kind), float(want.position)) for want in request.wants]
            self._engine.prefetch(session.session_id, job, wants)
            return pb.PrefetchResponse()

    async def AcquireLeases(
        self,
        request: pb.AcquireLeasesRequest,
        context: grpc.aio.ServicerContext[pb.AcquireLeasesRequest, pb.AcquireLeasesResponse],
    ) -> pb.AcquireLeasesResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            granted: list[Lease] = []
            try:
                for want in request.wants:
                    granted.append(await self._acquire(session, want))
            except BaseException:
                for lease in granted:
                    if not lease.void:
                        await self._sessions.release(session, lease, publish=False, next_use=NEVER)
                raise
            return pb.AcquireLeasesResponse(leases=[_lease_to_wire(lease) for lease in granted])

    async def _acquire(self, session: ClientSession, want: pb.AcquireLeasesRequest.Want) -> Lease:
        kind, group = wire.kind(want.slab.kind), want.slab.group
        session.require_run().check_whole()
        if want.mode == pb.LEASE_MODE_READ and kind is not Kind.GRAD:
            return await self._sessions.lease_for_reading(session, group, kind, float(want.position))
        if want.mode == pb.LEASE_MODE_WRITE and kind is Kind.GRAD:
            return await self._sessions.lease_for_gradient(session, group)
        if want.mode == pb.LEASE_MODE_WRITE:
            if want.step != 0:
                raise InvalidRequestError(
                    f"a write lease on kind {kind.value} is for step 0 only, not for step {want.step}: later bytes "
                    "come from ApplyGradients"
                )
            return await self._sessions.lease_for_staging(session, group, kind)
        raise InvalidRequestError(f"lease mode {want.mode} is not possible for kind {kind.value}")

    async def ReleaseLeases(
        self,
        request: pb.ReleaseLeasesRequest,
        context: grpc.aio.ServicerContext[pb.ReleaseLeasesRequest, pb.ReleaseLeasesResponse],
    ) -> pb.ReleaseLeasesResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            for release in request.releases:
                next_use = float(release.next_use) if release.HasField("next_use") else NEVER
                lease = session.lease(release.lease_id)
                # A publication that has begun is finished: the lease is gone either way.
                await asyncio.shield(self._sessions.release(session, lease, publish=release.publish, next_use=next_use))
            return pb.ReleaseLeasesResponse()

    async def Read(
        self, request: pb.ReadRequest, context: grpc.aio.ServicerContext[pb.ReadRequest, pb.ReadResponse]
    ) -> AsyncIterator[pb.ReadResponse]:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            match request.WhichOneof("source"):
                case "lease_id":
                    responses = streams.read_lease(self._engine, session.lease(request.lease_id))
                case "range":
                    responses = streams.read_range(self._engine, await session.job(), request.range)
                case _:
                    raise InvalidRequestError("source is not set; set lease_id or range")
            async for response in responses:
                yield response

    async def Write(
        self,
        request_iterator: AsyncIterator[pb.WriteRequest],
        context: grpc.aio.ServicerContext[pb.WriteRequest, pb.WriteResponse],
    ) -> pb.WriteResponse:
        async with answering_errors(context):
            requests = aiter(request_iterator)
            first = await anext(requests, None)
            if first is None or first.WhichOneof("message") != "header":
                raise InvalidRequestError("the first message of a write must be the header")
            session = self._session(first.header.session_id, context)
            return await streams.write_lease(self._engine, session.lease(first.header.lease_id), first.header, requests)

    async def ApplyGradients(
        self,
        request: pb.ApplyGradientsRequest,
        context: grpc.aio.ServicerContext[pb.ApplyGradientsRequest, pb.ApplyGradientsResponse],
    ) -> pb.ApplyGradientsResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            job = await session.job()
            session.require_run().check_whole()
            hyper_parameters = [wire.adamw_hyper_parameters(h) for h in request.hyper_parameters]
            checked = []
            for update in request.updates:
                lease = session.lease(update.grad_lease_id)
                if lease.pin is not None or lease.group != update.group:
                    raise ConflictError(f"lease {lease.lease_id} is not for the gradient of group {update.group!r}")
                kernel = wire.adamw_update(job.group(update.group).spec, update, hyper_parameters)
                self._engine.check_update(job, request.step, update.group)
                checked.append((lease, kernel))
            if len({lease.group for lease, _ in checked}) != len(checked):
                raise InvalidRequestError("a group is updated twice in one request")
            for lease, kernel in checked:
                region = self._sessions.consume_gradient(session, lease)
                self._engine.update(job, request.step, lease.group, region, kernel)
            return pb.ApplyGradientsResponse()

    async def CommitStep(
        self,
        request: pb.CommitStepRequest,
        context: grpc.aio.ServicerContext[pb.CommitStepRequest, pb.CommitStepResponse],
    ) -> pb.CommitStepResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            if request.settled_step > request.step:
                raise InvalidRequestError(f"settled_step {request.settled_step} is above step {request.step}")
            durable = await self._sessions.vote(session, request.step, request.client_state, request.settled_step)
            return pb.CommitStepResponse(durable=durable)

    async def RollBack(
        self, request: pb.RollBackRequest, context: grpc.aio.ServicerContext[pb.RollBackRequest, pb.RollBackResponse]
    ) -> pb.RollBackResponse:
        async with answering_errors(context):
            session = self._session(request.session_id, context)
            # Finished even if the client goes: a half-done roll-back would be a state that nobody asked for.
            await asyncio.shield(self._engine.roll_back(await session.job(), request.step))
            return pb.RollBackResponse()

    async def ListVersions(
        self,
        request: pb.ListVersionsRequest,
        context: grpc.aio.ServicerContext[pb.ListVersionsRequest, pb.ListVersionsResponse],
    ) -> pb.ListVersionsResponse:
        async with answering_errors(context):
            job = await self._session(request.session_id, context).job()
            return pb.ListVersionsResponse(
                versions=[
                    pb.VersionInfo(
                        step=step, durable=step in job.durable, committed_at_unix_seconds=commit.committed_at
                    )
                    for step, commit in sorted(job.retained.items())
                ]
            )


def _lease_to_wire(lease: Lease) -> pb.Lease:
    version = lease.pin.copy.step if lease.pin is not None else None
    return pb.Lease(
        lease_id=lease.lease_id,
        version=version or 0,
        arena_offset=lease.region.offset,
        size_bytes=lease.nbytes,
        generation=lease.region.generation,
    )
