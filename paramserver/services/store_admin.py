"""The StoreAdmin service: shows operators the tiers, jobs, shards and sessions, keeps steps, and deletes jobs.

The other methods that change a running store are in operations.py. This module owns nothing. It must never touch a job
that has sessions attached. A method that destroys or stops something does its work inside of `Audit.call`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from paramserver.events import KEPT_OF_A_KIND, EventKind
from paramserver.rpc import convert
from paramserver.rpc.paging import PageStart, page_size
from paramserver.rpc.rights import Right, needs
from paramserver.rpc.status import finished
from paramserver.security.gate import Context, check_deletion, check_job
from paramserver.security.principals import Principal
from paramserver.services.about import describe_config, describe_version
from paramserver.services.operations import AdminParts, Operations
from paramserver.sessions.host_quota import limits_of
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.vocabulary import DTYPE_TO_WIRE, KIND_TO_WIRE, TIER_TO_WIRE
from storage.base.errors import ConflictError, InvalidRequestError
from storage.base.shard import Kind, Shard, TierName
from storage.base.slices import in_slices
from storage.jobs.kept_steps import KeptSize
from storage.state.slab import Slab
from storage.state.versions import Job

MIN_WATCH_SECONDS = 0.1
# The most events in one answer of ListEvents, which are all that the event log can hold. An answer has DEFAULT_EVENTS
# if the client gives no number.
MAX_EVENTS = KEPT_OF_A_KIND * len(EventKind)
DEFAULT_EVENTS = 100


class StoreAdmin(Operations):
    """The methods of StoreAdmin; store_admin.proto says what each of them does."""

    def __init__(self, parts: AdminParts) -> None:
        """Make the service for a daemon that starts now; `parts` are the objects that its methods use."""
        super().__init__(parts)
        self._gate = parts.gate
        self._quotas = parts.quotas
        self._started_at = time.time()
        self._build = parts.build

    @needs(Right.ADMIN)
    async def GetTiers(self, _: admin_pb.GetTiersRequest) -> admin_pb.GetTiersResponse:
        return self._view.tiers()

    @needs(Right.ADMIN, takes_context=True)
    async def WatchTiers(
        self, request: admin_pb.WatchTiersRequest, context: Context
    ) -> AsyncIterator[admin_pb.GetTiersResponse]:
        interval = request.interval_seconds
        if not math.isfinite(interval) or interval < MIN_WATCH_SECONDS:
            raise InvalidRequestError(f"interval_seconds {interval} must be at least {MIN_WATCH_SECONDS}")
        while True:
            yield self._view.tiers()
            await asyncio.sleep(interval)
            # The admin right is checked again before each reading that the stream sends, because the token may have
            # been withdrawn since the last one.
            self._gate.require_admin(context)

    @needs(Right.ADMIN)
    async def GetAccounts(self, _: admin_pb.GetAccountsRequest) -> admin_pb.GetAccountsResponse:
        return admin_pb.GetAccountsResponse(accounts=await self._view.accounts())

    @needs(Right.ADMIN)
    async def ListJobs(self, _: admin_pb.ListJobsRequest) -> admin_pb.ListJobsResponse:
        response = admin_pb.ListJobsResponse()
        # The list of jobs is filled job by job, with pauses. A copy of ten thousand jobs at once would block the event
        # loop for 20 ms.
        async for job in self._view.jobs(self._view.job_names):
            response.jobs.append(job)
        return response

    @needs(Right.ADMIN)
    async def ListShards(self, request: admin_pb.ListShardsRequest) -> admin_pb.ListShardsResponse:
        job = self.known_job(request.job)
        kinds = list(KIND_TO_WIRE) if request.kind == pb.KIND_UNSPECIFIED else [convert.kind(request.kind)]
        size, start = page_size(request.page_size), PageStart.of_token(request.page_token)
        listed: list[admin_pb.ShardInfo] = []
        async for place, slab, shard in in_slices(_shards_from(job, start, request.fqn_prefix, kinds)):
            if slab is None:
                continue
            if len(listed) == size:
                return admin_pb.ListShardsResponse(shards=listed, next_page_token=place.to_token())
            listed.append(_describe_shard(slab, shard))
        return admin_pb.ListShardsResponse(shards=listed)

    @needs(Right.ADMIN)
    async def ListSessions(self, _: admin_pb.ListSessionsRequest) -> admin_pb.ListSessionsResponse:
        return admin_pb.ListSessionsResponse(sessions=self._view.sessions())

    @needs(Right.TOKEN, takes_context=True)
    async def DeleteJob(
        self, request: admin_pb.DeleteJobRequest, principal: Principal, context: Context
    ) -> admin_pb.DeleteJobResponse:
        check_deletion(principal, request.job)
        return await self._audit.call("DeleteJob", request, principal, context, self._delete_job(request, principal))

    async def _delete_job(self, request: admin_pb.DeleteJobRequest, principal: Principal) -> admin_pb.DeleteJobResponse:
        convert.name(request.job, "job")
        if request.job not in self._engine.jobs.by_name and not self._engine.jobs.kept_steps(request.job):
            raise self.unknown_job(request.job, principal)
        # DeleteJob must not await anything between this check for attached ranks and the deletion, because a session
        # could join the job meanwhile.
        if attached := self._sessions.attached(request.job):
            raise ConflictError(f"job {request.job!r} has {attached} sessions attached; stop its trainers first")
        await self._engine.delete_job(request.job)
        self._sessions.forget_job(request.job)
        self._events.add(EventKind.JOB, request.job, "the job was deleted")
        return admin_pb.DeleteJobResponse()

    @needs(Right.TOKEN)
    async def KeepStep(self, request: admin_pb.KeepStepRequest, principal: Principal) -> admin_pb.KeepStepResponse:
        check_job(principal, request.job)
        name, note = convert.name(request.name, "name"), convert.name(request.note or "-", "note")
        step = convert.step(request.step, "step") if request.HasField("step") else None
        name_of_job = convert.name(request.job, "job")
        if name_of_job not in self._engine.jobs.by_name:
            raise self.unknown_job(name_of_job, principal)
        job = self._engine.jobs.settled_layout(name_of_job) if step is None else self._engine.jobs.job(name_of_job)
        limits = limits_of(self._quotas, principal, request.job)
        # The step is kept even if the client goes during the call. So a client that lists the kept steps later gets an
        # answer that does not change afterwards.
        kept = await finished(
            self._engine.kept_steps.keep(job, step, name, note=note if request.note else "", limits=limits)
        )
        return admin_pb.KeepStepResponse(kept=_describe_kept(kept, None), state_dir=str(self._view.state_dir))

    @needs(Right.TOKEN, takes_context=True)
    async def ForgetStep(
        self, request: admin_pb.ForgetStepRequest, principal: Principal, context: Context
    ) -> admin_pb.ForgetStepResponse:
        check_job(principal, request.job)
        job, name = convert.name(request.job, "job"), convert.name(request.name, "name")
        self.check_known(job, principal)
        await self._audit.call("ForgetStep", request, principal, context, self._engine.kept_steps.forget(job, name))
        return admin_pb.ForgetStepResponse()

    @needs(Right.TOKEN)
    async def ListKeptSteps(
        self, request: admin_pb.ListKeptStepsRequest, principal: Principal
    ) -> admin_pb.ListKeptStepsResponse:
        check_job(principal, request.job)
        name = convert.name(request.job, "job")
        sizes = await self._engine.kept_steps.sizes(name)
        # The computation of the sizes has awaited. A step that was kept meanwhile has no size, and one that was
        # forgotten is no longer kept, so both are left out of the answer.
        kept = sorted(
            (kept for key, kept in self._engine.jobs.kept_steps(name).items() if key in sizes),
            key=lambda kept: (kept.first_step, kept.spec.kept),
        )
        return admin_pb.ListKeptStepsResponse(
            kept=[_describe_kept(step, sizes[step.spec.kept]) for step in kept],
            state_dir=str(self._view.state_dir),
        )

    @needs(Right.ADMIN)
    async def ListSteps(self, request: admin_pb.ListStepsRequest) -> admin_pb.ListStepsResponse:
        self.check_known(request.job)
        return await self._view.steps(request.job)

    @needs(Right.ADMIN)
    async def GetPrefetch(self, _: admin_pb.GetPrefetchRequest) -> admin_pb.GetPrefetchResponse:
        return await self._view.prefetch()

    @needs(Right.ADMIN)
    async def ListEvents(self, request: admin_pb.ListEventsRequest) -> admin_pb.ListEventsResponse:
        return self._recent_events(request, request.after)

    @needs(Right.ADMIN, takes_context=True)
    async def WatchEvents(
        self, request: admin_pb.ListEventsRequest, context: Context
    ) -> AsyncIterator[admin_pb.ListEventsResponse]:
        # A client may give the number of an event from before the daemon's restart, which may be higher than that of
        # any event of this daemon. The stream would then send no event for a long time, so the number is lowered to
        # that of the newest event.
        seen = min(request.after, self._events.newest_number)
        while True:
            # The newest event's number is read before the events are. So an event that is added while the client takes
            # the response has a higher number, and comes with the next response.
            newest = self._events.newest_number
            response = self._recent_events(request, seen)
            if response.events:
                yield response
            seen = newest
            await self._events.wait_after(seen)
            # The admin right is checked again before each response of the stream, because the token may have been
            # withdrawn since the last event.
            self._gate.require_admin(context)

    def _recent_events(self, request: admin_pb.ListEventsRequest, after: int) -> admin_pb.ListEventsResponse:
        kinds = [_event_kind(word) for word in convert.batch(request.kinds, "kinds")]
        limit = MAX_EVENTS if request.limit > MAX_EVENTS else request.limit or DEFAULT_EVENTS
        return admin_pb.ListEventsResponse(
            events=[
                admin_pb.Event(
                    number=event.number,
                    unix_seconds=event.time,
                    kind=event.kind,
                    subject=event.subject,
                    text=event.text,
                )
                for event in self._events.recent(limit, after=after, kinds=kinds)
            ],
            epoch=self._view.epoch,
        )

    @needs(Right.ADMIN)
    async def GetConfig(self, _: admin_pb.GetConfigRequest) -> admin_pb.GetConfigResponse:
        return describe_config(self._configuration.present)

    @needs(Right.ADMIN)
    async def GetVersion(self, _: admin_pb.GetVersionRequest) -> admin_pb.GetVersionResponse:
        return describe_version(self._build, self._view.epoch, self._view.state_dir, self._started_at)


def _event_kind(word: str) -> EventKind:
    if word not in set(EventKind):
        raise InvalidRequestError(f"kinds has {word!r}; the kinds of events are {', '.join(EventKind)}")
    return EventKind(word)


def _describe_kept(kept: Job, size: KeptSize | None) -> admin_pb.KeptStep:
    """Return the message for a kept step; without a size, its bytes are left out."""
    ((step, record),) = kept.retained.items()
    return admin_pb.KeptStep(
        name=kept.spec.kept,
        note=kept.spec.note,
        step=step,
        layout=kept.spec.layout,
        world_size=kept.spec.world_size,
        kept_at_unix_seconds=kept.created_at,
        committed_at_unix_seconds=record.committed_at,
        bytes=0 if size is None else size.nbytes,
        alone_bytes=0 if size is None else size.alone_bytes,
    )


def _shards_from(
    job: Job, start: PageStart, prefix: str, kinds: Sequence[Kind]
) -> Iterator[tuple[PageStart, Slab | None, Shard]]:
    """Yield the shards of a job from `start` on, by FQN, kind and offset, each with its page start and its slab.

    The slab is None if the shard's group has no slab of that kind.
    """
    numbered = sorted((KIND_TO_WIRE[kind], kind) for kind in kinds)
    for fqn in job.index.names_from(start.fqn, prefix):
        first = start if fqn == start.fqn else PageStart(fqn)
        placed = job.index.of(fqn)
        for number, kind in numbered:
            if number < first.kind:
                continue
            for i in range(first.shard if number == first.kind else 0, len(placed)):
                shard, group = placed[i]
                slab = next((slab for slab in group.slabs if slab.key.kind is kind), None)
                yield PageStart(fqn, number, i), slab, shard


def _describe_shard(slab: Slab, shard: Shard) -> admin_pb.ShardInfo:
    tiers = [TierName.HOST] if slab.current_copy is not None else []
    if slab.latest is not None and (region := slab.versions.get(slab.latest)) is not None:
        tiers.append(region.tier.name)
    return admin_pb.ShardInfo(
        fqn=shard.fqn,
        kind=KIND_TO_WIRE[slab.key.kind],
        offset=shard.offset,
        numel=shard.numel,
        dtype=DTYPE_TO_WIRE[slab.spec.dtype],
        group=slab.key.group,
        version=slab.latest,
        tiers=[TIER_TO_WIRE[tier] for tier in tiers],
        placement=TIER_TO_WIRE[slab.spec.placement],
    )
