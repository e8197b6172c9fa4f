"""The readings of a running store, as the messages of StoreAdmin: tiers, jobs, sessions and accounts.

The admin service sends them to operators, and the metrics are made from them, so both always agree. This module owns
nothing. It must never change the store.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from paramserver.dataplane.chunk_budget import ChunkBudget
from paramserver.process.loop_watch import LoopWatch
from paramserver.rpc import convert
from paramserver.sessions.leases import Lease
from paramserver.sessions.replicas import Replica
from paramserver.sessions.session import Session
from paramserver.sessions.session_state import SessionState
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.vocabulary import TIER_TO_WIRE
from storage.base.shard import TierName
from storage.base.slices import in_slices
from storage.engine import Engine
from storage.jobs.accounts import Holder, TierAccount
from storage.jobs.upkeep import HeldStep
from storage.memory.prefetch import WindowState
from storage.tiers.base import TierCounters
from storage.tiers.contract import Tier
from storage.tiers.data_file import DataFile
from storage.tiers.lent import Loan
from storage.tiers.remote import RemoteTier


class StoreView:
    """The object that reads figures of one daemon's store. All methods are called on its event loop."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        chunk_budget: ChunkBudget,
        watch: LoopWatch,
        epoch: str,
        state_dir: Path,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._chunk_budget = chunk_budget
        self._watch = watch
        self.epoch = epoch
        self.state_dir = state_dir.absolute()

    @property
    def job_names(self) -> list[str]:
        """The names of all jobs, sorted, including jobs of which only kept steps are left."""
        return sorted({*self._engine.jobs.by_name, *self._engine.jobs.kept})

    async def accounts(self) -> Sequence[admin_pb.TierAccount]:
        """Return who holds the used bytes of each tier. This visits all shards."""
        accounts = await self._engine.accountant.take(
            leased=lambda: [range_ for lease in self._leases() for range_ in lease.held_ranges],
            spilled=lambda: [region for lease in self._leases() for region in lease.held_regions],
            quarantined=lambda: self._sessions.quarantine.ranges,
        )
        return [_describe_account(account) for account in accounts]

    def _leases(self) -> Iterator[Lease]:
        return (lease for session in self._sessions for lease in session.leases.values())

    def sessions(self) -> Sequence[admin_pb.SessionInfo]:
        """Return the description of each session and of what it holds, oldest first."""
        return [self.session(session) for session in self._sessions]

    @property
    def lost_sessions(self) -> int:
        """The number of sessions that ended because the client was silent, or did not come back."""
        return self._sessions.lost

    def tiers(self) -> admin_pb.GetTiersResponse:
        """Return the present figures of every tier: its used bytes, counters, problems and devices."""
        return admin_pb.GetTiersResponse(
            tiers=[self._describe_tier(tier) for tier in self._engine.tiers],
            epoch=self.epoch,
            state_dir=str(self.state_dir),
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
            info.gradient_bytes = engine.gradients.parked_bytes
            info.activation_bytes = engine.gradients.activation_bytes_in_arena
            info.quarantined_bytes = self._sessions.quarantine.nbytes
            info.queue_depth += engine.queue.depth
            info.lent_bytes = engine.lent.used_bytes
            info.lend_budget_bytes = engine.lent.budget_bytes
            info.loans.extend(_describe_loan(loan) for loan in engine.lent.loans)
        elif tier is engine.gpu:
            info.leased_bytes = engine.gpu.leased_bytes
            info.evictable_bytes = info.used_bytes - info.leased_bytes
        elif tier in engine.backing.copies:
            # A copy tier has only copies of versions that are on NVMe, too. So all its bytes can be evicted.
            info.evictable_bytes = info.used_bytes
            if isinstance(tier, RemoteTier):
                # The engine's record of a lender has fields of the same names as the message, so asdict() gives the
                # message's fields.
                info.lenders.extend(admin_pb.TierInfo.Lender(**asdict(lender)) for lender in tier.lenders)
        elif tier is engine.nvme:
            info.devices.extend(_describe_device(file) for file in engine.nvme.files)
            info.gradient_bytes = engine.gradients.spilled_bytes
            info.activation_bytes = engine.gradients.spilled_activation_bytes
            info.damaged_blocks = engine.nvme.damaged_blocks
            info.bad_bytes = engine.nvme.bad_bytes
            info.scrubbed_bytes = engine.scrubber.bytes_read
            info.scrub_passes = engine.scrubber.passes
        return info

    def session(self, session: Session) -> admin_pb.SessionInfo:
        """Return the description of a session and of what it holds."""
        writing = sum(lease.mode.is_for_writing for lease in session.leases.values())
        return admin_pb.SessionInfo(
            client=session.client,
            peer=session.peer,
            job=session.run.spec.name if session.run else "",
            rank=max(0, session.rank),
            maps_arena=session.slot is not None and self._engine.host.arena.slots.is_held(session.slot),
            read_leases=len(session.leases) - writing + len(session.device_leases),
            write_leases=writing,
            leased_bytes=sum(lease.nbytes for lease in session.leases.values()),
            readers=len(session.readers),
            transfers=self._chunk_budget.count(session.session_id),
            opened_at_unix_seconds=session.opened_at_unix_seconds,
            heard_seconds_ago=asyncio.get_running_loop().time() - session.heard_at,
            detached=session.state is SessionState.DETACHED,
            device_bytes=0 if session.device is None else session.device.used_bytes,
            device_budget_bytes=0 if session.device is None else session.device.budget_bytes,
        )

    async def prefetch(self) -> admin_pb.GetPrefetchResponse:
        """Return the fetch queue, and the window of each session."""
        queue, counters = self._engine.queue, self._engine.host.counters
        # The prefetch queue knows the owner of a window only by its session's id, so the session is looked up for the
        # client's name. If the session has ended, the window is described without a client.
        sessions = {session.session_id: session for session in self._sessions}
        windows = [
            _describe_window(queue.window(owner), sessions.get(owner)) async for owner in in_slices(queue.owners)
        ]
        state = queue.state
        return admin_pb.GetPrefetchResponse(
            in_flight_bytes=state.in_flight_bytes,
            in_flight_budget_bytes=state.in_flight_budget_bytes,
            running=state.running,
            waiting=state.waiting,
            demands=state.demands,
            hits=counters.hits,
            misses=counters.misses,
            windows=windows,
            jobs=[
                admin_pb.GetPrefetchResponse.Fetched(job=job, bytes=fetched.nbytes, seconds=fetched.seconds)
                for job, fetched in sorted(queue.fetched_by_job.items())
            ],
        )

    async def steps(self, name: str) -> admin_pb.ListStepsResponse:
        """Return the steps of a job that the store holds, oldest first. This visits all shards of the job."""
        steps = [_describe_step(step) for step in await self._engine.upkeep.steps(name)]
        return admin_pb.ListStepsResponse(steps=steps, state_dir=str(self.state_dir))

    def job(self, name: str) -> admin_pb.JobInfo:
        """Return the figures of a job, which is attached, or committed, or has kept steps."""
        kept = self._engine.jobs.kept_steps(name)
        if name not in self._engine.jobs.by_name:
            # The store has kept steps of this job and no other state of it. The daemon was restarted, and no step that
            # the job committed itself was durable. So the figures come from the description of a kept step.
            spec = next(iter(kept.values())).spec
            durability = convert.durability_to_wire(spec.durability)
            return admin_pb.JobInfo(name=name, world_size=spec.world_size, durability=durability, kept_steps=len(kept))
        job = self._engine.jobs.job(name)
        newest, durable = job.newest, max(job.durable, default=None)
        # The job's bytes are added up over all its layouts, because the store has two while a new layout replaces the
        # former one.
        tallies = [layout.tally for layout in self._engine.jobs.layouts(name)]
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
            settled_step=self._engine.jobs.settled_layout(name).settled_step,
            bytes=[admin_pb.JobInfo.TierBytes(tier=TIER_TO_WIRE[tier], bytes=nbytes) for tier, nbytes in size.items()],
            created_at_unix_seconds=job.created_at,
            committed_at_unix_seconds=None if newest is None else job.retained[newest].committed_at,
            kept_steps=len(kept),
            replicas=[_describe_replica(replica, job.settled_step) for replica in self._sessions.replicas.of_job(name)],
        )

    async def leading_jobs(self, most: int) -> tuple[Sequence[admin_pb.JobInfo], int]:
        """Return the figures of at most `most` jobs, and the number of all jobs.

        Jobs with sessions come first, then those with the newest commits.
        """
        names = self.job_names
        # Only the sort key of each job is computed here, and the figures of the leading jobs later, because the figures
        # of ten thousand jobs take a second.
        keys = [(self._rank(name), name) async for name in in_slices(names)]
        leading = [name for _, name in heapq.nlargest(most, keys, key=lambda found: found[0])]
        return [job async for job in self.jobs(leading)], len(names)

    async def jobs(self, names: Iterable[str]) -> AsyncIterator[admin_pb.JobInfo]:
        """Yield the figures of some jobs, without those that are deleted meanwhile."""
        async for name in in_slices(names):
            if self.is_known(name):
                yield self.job(name)

    def is_known(self, name: str) -> bool:
        """Return whether there is a job of this name, or a kept step of it."""
        return name in self._engine.jobs.by_name or bool(self._engine.jobs.kept_steps(name))

    def _rank(self, name: str) -> tuple[bool, float]:
        """Return a key by which jobs in use are the largest, and among the others those with the newest commits."""
        job = self._engine.jobs.by_name.get(name)
        committed_at = 0.0 if job is None or job.newest is None else job.retained[job.newest].committed_at
        return self._sessions.attached(name) > 0, committed_at


def _describe_replica(replica: Replica, newest: int | None) -> admin_pb.JobInfo.Replica:
    return admin_pb.JobInfo.Replica(
        holder=replica.holder,
        step=replica.step,
        lag_steps=replica.lag_steps(newest),
        lag_seconds=replica.lag_seconds(newest),
        sent_bytes=replica.sent_bytes,
        copy_seconds=replica.copy_seconds,
        problem=replica.problem,
    )


def _describe_window(window: WindowState, session: Session | None) -> admin_pb.GetPrefetchResponse.Window:
    return admin_pb.GetPrefetchResponse.Window(
        client=session.client if session else "",
        job=session.run.spec.name if session and session.run else "",
        rank=max(0, session.rank) if session else 0,
        slabs=window.slabs,
        bytes=window.nbytes,
        present=window.present,
        running=window.running,
        waiting=window.waiting,
    )


def _describe_step(step: HeldStep) -> admin_pb.StepInfo:
    return admin_pb.StepInfo(
        step=step.record.step,
        layout=step.layout,
        world_size=step.world_size,
        committed_at_unix_seconds=step.record.committed_at,
        newest=step.is_newest,
        retained=step.is_retained,
        durable=step.is_durable,
        kept_as=step.kept_as,
        readers=step.readers,
        bytes=[
            admin_pb.JobInfo.TierBytes(tier=TIER_TO_WIRE[tier], bytes=nbytes)
            for tier, nbytes in step.size_bytes.items()
        ],
        alone_bytes=step.alone_bytes,
        settled=step.is_settled,
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
        moved_bytes=account.moved_bytes,
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


def _describe_loan(loan: Loan) -> admin_pb.TierInfo.Loan:
    return admin_pb.TierInfo.Loan(
        borrower=loan.borrower,
        token=loan.identity,
        peer=loan.peer,
        size_bytes=loan.size_bytes,
        used_bytes=loan.used_bytes,
        bytes_read=loan.bytes_read,
        bytes_written=loan.bytes_written,
        taken_back_bytes=loan.taken_back_bytes,
    )


def _fill_counters(info: admin_pb.TierInfo, counters: TierCounters) -> None:
    info.hits = counters.hits
    info.misses = counters.misses
    info.promotions = counters.promotions
    info.demotions = counters.demotions
    info.bytes_read = counters.bytes_read
    info.bytes_written = counters.bytes_written
    info.read_seconds = counters.reading.elapsed
    info.write_seconds = counters.writing.elapsed
