"""The StoreAdmin service: shows operators the tiers, jobs, shards and sessions, keeps steps, and deletes jobs.

Owns nothing. Must never touch a job that has sessions attached.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from paramserver.dataplane.chunk_budget import ChunkBudget
from paramserver.process.loop_watch import LoopWatch
from paramserver.rpc import convert
from paramserver.rpc.paging import Place, page_size
from paramserver.rpc.rights import Right, needs
from paramserver.rpc.status import finished
from paramserver.security.gate import Context, Gate, check_deletion, check_job
from paramserver.security.principals import Principal, Role
from paramserver.security.quotas import Quotas
from paramserver.sessions.host_quota import limits_of
from paramserver.sessions.session import Session, SessionState
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.vocabulary import DTYPE_TO_WIRE, KIND_TO_WIRE, TIER_TO_WIRE
from storage.accounts import Holder, TierAccount
from storage.engine import Engine
from storage.errors import ConflictError, InvalidRequestError, NotFoundError
from storage.kept_steps import KeptSize
from storage.shard import Kind, Shard, TierName
from storage.slab import Slab
from storage.slices import in_slices
from storage.tiers.base import TierCounters
from storage.tiers.contract import Tier
from storage.tiers.data_file import DataFile
from storage.versions import Job

MIN_WATCH_SECONDS = 0.1


class StoreAdmin:
    """The methods of StoreAdmin; store_admin.proto says what each of them does."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        chunk_budget: ChunkBudget,
        watch: LoopWatch,
        epoch: str,
        state_dir: Path,
        gate: Gate,
        quotas: Quotas,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._chunk_budget = chunk_budget
        self._watch = watch
        self._epoch = epoch
        self._state_dir = state_dir
        self._gate = gate
        self._quotas = quotas

    @needs(Right.ADMIN)
    async def GetTiers(self, _: admin_pb.GetTiersRequest) -> admin_pb.GetTiersResponse:
        return self._read_tiers()

    @needs(Right.ADMIN, takes_context=True)
    async def WatchTiers(
        self, request: admin_pb.WatchTiersRequest, context: Context
    ) -> AsyncIterator[admin_pb.GetTiersResponse]:
        interval = request.interval_seconds
        if not math.isfinite(interval) or interval < MIN_WATCH_SECONDS:
            raise InvalidRequestError(f"interval_seconds {interval} must be at least {MIN_WATCH_SECONDS}")
        while True:
            yield self._read_tiers()
            await asyncio.sleep(interval)
            # The check comes again each time, because the token may have been withdrawn since the last reading.
            self._gate.require_admin(context)
            self._gate.require_admin(context)

    @needs(Right.ADMIN)
    async def GetAccounts(self, _: admin_pb.GetAccountsRequest) -> admin_pb.GetAccountsResponse:
        accounts = self._engine.accounts(
            leased=(lease.arena_range for session in self._sessions for lease in session.leases.values()),
            quarantined=self._sessions.quarantine.ranges,
        )
        return admin_pb.GetAccountsResponse(accounts=[_describe_account(account) for account in accounts])

    @needs(Right.ADMIN)
    async def ListJobs(self, _: admin_pb.ListJobsRequest) -> admin_pb.ListJobsResponse:
        names = sorted({*self._engine.jobs, *self._engine.jobs_with_kept_steps})
        return admin_pb.ListJobsResponse(jobs=[self._describe_job(name) async for name in in_slices(names)])

    @needs(Right.ADMIN)
    async def ListShards(self, request: admin_pb.ListShardsRequest) -> admin_pb.ListShardsResponse:
        job = self._job(request.job)
        kinds = list(KIND_TO_WIRE) if request.kind == pb.KIND_UNSPECIFIED else [convert.kind(request.kind)]
        size, start = page_size(request.page_size), Place.of_token(request.page_token)
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
        return admin_pb.ListSessionsResponse(sessions=[self._describe_session(s) for s in self._sessions])

    @needs(Right.TOKEN)
    async def DeleteJob(self, request: admin_pb.DeleteJobRequest, principal: Principal) -> admin_pb.DeleteJobResponse:
        check_deletion(principal, request.job)
        convert.name(request.job, "job")
        if request.job not in self._engine.jobs and not self._engine.kept_steps(request.job):
            # Only an operator may learn which jobs there are, so the text for others does not list them.
            raise self._no_job(request.job) if principal.role is Role.ADMIN else _no_job(request.job)
        # This is finished even if the client goes, because a half-deleted job could not be used any more.
        await finished(self._delete(request.job))
        return admin_pb.DeleteJobResponse()

    async def _delete(self, name: str) -> None:
        # There must be no wait between this check and the deletion, because a session could join the job meanwhile.
        if attached := self._sessions.attached(name):
            raise ConflictError(f"job {name!r} has {attached} sessions attached; stop its trainers first")
        await self._engine.delete_job(name)

    @needs(Right.TOKEN)
    async def KeepStep(self, request: admin_pb.KeepStepRequest, principal: Principal) -> admin_pb.KeepStepResponse:
        check_job(principal, request.job)
        name, note = convert.name(request.name, "name"), convert.name(request.note or "-", "note")
        step = convert.step(request.step, "step") if request.HasField("step") else None
        job = self._engine.job(convert.name(request.job, "job"))
        limits = limits_of(self._quotas, principal, request.job)
        # This is finished even if the client goes, because the client may then ask which steps are kept.
        kept = await finished(self._engine.keep(job, step, name, note=note if request.note else "", limits=limits))
        return admin_pb.KeepStepResponse(kept=_describe_kept(kept, None), state_dir=str(self._state_dir.absolute()))

    @needs(Right.TOKEN)
    async def ForgetStep(
        self, request: admin_pb.ForgetStepRequest, principal: Principal
    ) -> admin_pb.ForgetStepResponse:
        check_job(principal, request.job)
        name = convert.name(request.name, "name")
        await finished(self._engine.forget(convert.name(request.job, "job"), name))
        return admin_pb.ForgetStepResponse()

    @needs(Right.TOKEN)
    async def ListKeptSteps(
        self, request: admin_pb.ListKeptStepsRequest, principal: Principal
    ) -> admin_pb.ListKeptStepsResponse:
        check_job(principal, request.job)
        name = convert.name(request.job, "job")
        sizes = await self._engine.kept_sizes(name)
        # A step that was kept or forgotten since has no size here.
        kept = sorted(
            (kept for key, kept in self._engine.kept_steps(name).items() if key in sizes),
            key=lambda kept: (kept.first_step, kept.spec.kept),
        )
        return admin_pb.ListKeptStepsResponse(
            kept=[_describe_kept(step, sizes[step.spec.kept]) for step in kept],
            state_dir=str(self._state_dir.absolute()),
        )

    def _job(self, name: str) -> Job:
        """Return the job of a name.

        Raises:
            NotFoundError: there is no such job. The text lists the jobs that there are, for the operator.
        """
        convert.name(name, "job")
        if name not in self._engine.jobs:
            raise self._no_job(name)
        return self._engine.job(name)

    def _no_job(self, name: str) -> NotFoundError:
        """Return the error for an operator who names a job that is not there. Its text lists the jobs that are."""
        known = ", ".join(sorted({*self._engine.jobs, *self._engine.jobs_with_kept_steps})) or "none"
        return NotFoundError(f"there is no job {name!r}; known jobs: {known}")

    def _read_tiers(self) -> admin_pb.GetTiersResponse:
        return admin_pb.GetTiersResponse(
            tiers=[self._describe_tier(tier) for tier in self._engine.tiers],
            epoch=self._epoch,
            state_dir=str(self._state_dir.absolute()),
            sessions=len(self._sessions),
            unix_seconds=time.time(),
            loop_stalls=self._watch.stalls,
            longest_loop_stall_seconds=self._watch.longest_stall_seconds,
            transfer_bytes=self._chunk_budget.used_bytes,
            transfer_budget_bytes=self._chunk_budget.budget_bytes,
        )

    def _describe_tier(self, tier: Tier) -> admin_pb.TierInfo:
        engine = self._engine
        info = admin_pb.TierInfo(
            tier=TIER_TO_WIRE[tier.name],
            budget_bytes=tier.budget_bytes,
            used_bytes=tier.used_bytes,
            queue_depth=tier.queue_depth,
            detail=tier.detail,
            problems=engine.backing.problems_of(tier),
        )
        _fill_counters(info, tier.counters)
        if tier is engine.host:
            info.leased_bytes = engine.host_cache.leased_bytes + engine.scratch.nbytes
            info.evictable_bytes = engine.host_cache.evictable_bytes
            info.quarantined_bytes = self._sessions.quarantine.nbytes
            info.queue_depth += engine.queue.depth
        elif tier is engine.nvme:
            info.devices.extend(_describe_device(file) for file in engine.nvme.files)
            info.damaged_blocks = engine.nvme.damaged_blocks
            info.bad_bytes = engine.nvme.bad_bytes
            info.scrubbed_bytes = engine.scrubber.bytes_read
            info.scrub_passes = engine.scrubber.passes
        return info

    def _describe_session(self, session: Session) -> admin_pb.SessionInfo:
        writing = sum(lease.mode.is_for_writing for lease in session.leases.values())
        return admin_pb.SessionInfo(
            client=session.client,
            peer=session.peer,
            job=session.run.spec.name if session.run else "",
            rank=max(0, session.rank),
            maps_arena=session.slot is not None and self._engine.arena.slots.is_held(session.slot),
            read_leases=len(session.leases) - writing,
            write_leases=writing,
            leased_bytes=sum(lease.nbytes for lease in session.leases.values()),
            readers=len(session.readers),
            transfers=self._chunk_budget.count(session.session_id),
            opened_at_unix_seconds=session.opened_at_unix_seconds,
            heard_seconds_ago=asyncio.get_running_loop().time() - session.heard_at,
            detached=session.state is SessionState.DETACHED,
        )

    def _describe_job(self, name: str) -> admin_pb.JobInfo:
        kept = self._engine.kept_steps(name)
        if name not in self._engine.jobs:
            # Nothing but kept steps is left of the job, because none of its commits was durable before a restart.
            spec = next(iter(kept.values())).spec
            durability = convert.durability_to_wire(spec.durability)
            return admin_pb.JobInfo(name=name, world_size=spec.world_size, durability=durability, kept_steps=len(kept))
        job = self._engine.job(name)
        newest, durable = job.newest, max(job.durable, default=None)
        # All layouts count, because the store has two of them while one replaces the other.
        tallies = [layout.tally for layout in self._engine.layouts(name)]
        size = {TierName.HOST: sum(tally.copied_bytes for tally in tallies)}
        size |= {tier.name: sum(t.version_bytes(tier.name) for t in tallies) for tier in self._engine.backing}
        return admin_pb.JobInfo(
            name=job.spec.name,
            world_size=job.spec.world_size,
            sessions=self._sessions.attached(job.spec.name),
            parameters=job.tally.elements,
            durability=convert.durability_to_wire(job.spec.durability),
            committed_step=newest,
            durable_step=durable,
            bytes=[admin_pb.JobInfo.TierBytes(tier=TIER_TO_WIRE[tier], bytes=nbytes) for tier, nbytes in size.items()],
            created_at_unix_seconds=job.created_at,
            committed_at_unix_seconds=None if newest is None else job.retained[newest].committed_at,
            kept_steps=len(kept),
        )


def _no_job(name: str) -> NotFoundError:
    return NotFoundError(f"there is no job {name!r}")


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


def _describe_account(account: TierAccount) -> admin_pb.TierAccount:
    return admin_pb.TierAccount(
        tier=TIER_TO_WIRE[account.tier],
        used_bytes=account.used_bytes,
        holdings=[
            admin_pb.TierAccount.Holding(holder=holder, bytes=account.held_bytes[holder])
            for holder in Holder
            if account.held_bytes.get(holder, 0)
        ],
        unexplained_bytes=account.unexplained_bytes,
        settled=account.is_balanced,
    )


def _describe_device(file: DataFile) -> admin_pb.TierInfo.Device:
    load = file.io.load
    return admin_pb.TierInfo.Device(
        path=str(file.path),
        direct=file.direct,
        used_bytes=file.used_bytes,
        size_bytes=file.size_bytes,
        free_runs=file.free_runs,
        bytes_in_flight=load.bytes_in_flight,
        busy_seconds=load.busy_seconds,
        stalled_seconds=load.stalled_seconds,
        bytes_per_second=file.bandwidth,
    )


def _shards_from(
    job: Job, start: Place, prefix: str, kinds: Sequence[Kind]
) -> Iterator[tuple[Place, Slab | None, Shard]]:
    """Yield the shards of a job from a place on, by FQN, kind and offset, each with its place and its slab.

    The slab is None if the shard's group has no slab of that kind.
    """
    numbered = sorted((KIND_TO_WIRE[kind], kind) for kind in kinds)
    for fqn in job.index.names_from(start.fqn, prefix):
        first = start if fqn == start.fqn else Place(fqn)
        placed = job.index.of(fqn)
        for number, kind in numbered:
            if number < first.kind:
                continue
            for i in range(first.shard if number == first.kind else 0, len(placed)):
                shard, group = placed[i]
                slab = next((slab for slab in group.slabs if slab.key.kind is kind), None)
                yield Place(fqn, number, i), slab, shard


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


def _fill_counters(info: admin_pb.TierInfo, counters: TierCounters) -> None:
    info.hits = counters.hits
    info.misses = counters.misses
    info.promotions = counters.promotions
    info.demotions = counters.demotions
    info.bytes_read = counters.bytes_read
    info.bytes_written = counters.bytes_written
    info.read_seconds = counters.reading.seconds
    info.write_seconds = counters.writing.seconds
