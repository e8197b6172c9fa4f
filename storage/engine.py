"""The face of the storage engine: jobs, reads, writes, updates, commit and roll-back over the tiers.

Owns the state directory: the lock, the catalog and the data files. All methods are called on one event loop. Reads wait
for the update of what they read; nothing that is committed is ever overwritten.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch

from storage import syscalls
from storage.accounts import TierAccount, backing_accounts, host_account
from storage.admission import Limit
from storage.assembly import Tiers, open_tiers
from storage.catalog.catalog import Catalog
from storage.catalog.thread import CatalogThread
from storage.commit import Committer
from storage.config import EngineConfig
from storage.copy_writes import CopyWrites
from storage.damage_log import DamageLog
from storage.demand_reads import DemandReads
from storage.directories import CATALOG, LOCK
from storage.errors import ConflictError, StepAbortedError, StorageError
from storage.host_cache import HostCache
from storage.job_registry import JobRegistry
from storage.job_table import JobTable
from storage.pending_steps import PendingSteps
from storage.prefetch import PrefetchQueue
from storage.reader import RangeReader, StepReader
from storage.scratch import ScratchRanges
from storage.scrub import Scrubber
from storage.shard import GroupSpec, JobSpec, Kind
from storage.slab import NEVER, HostCopy, Slab
from storage.threads import begin_work
from storage.tiers.arena import Arena, ArenaRange
from storage.tiers.contract import BackingTier, Region, Tier
from storage.tracing import Tracer
from storage.transform import Kernel, TilePool, Transformer
from storage.versions import Job

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A slab's bytes in the arena, held until `Engine.unpin`."""

    slab: Slab
    copy: HostCopy

    @property
    def region(self) -> ArenaRange:
        """Where the bytes are."""
        return self.copy.region


class Engine:
    """An open state directory."""

    def __init__(
        self,
        config: EngineConfig,
        lock_fd: int,
        tiers: Tiers,
        jobs: JobTable,
        tracer: Tracer,
        catalog: Catalog,
        catalog_thread: CatalogThread,
        damage_log: DamageLog,
    ) -> None:
        """For `open` only."""
        self.config = config
        self.host = tiers.host
        self.nvme = tiers.nvme
        self.backing = tiers.backing
        self.tracer = tracer
        self.host_cache = HostCache(self.host, tiers.eviction_order)
        self.queue = PrefetchQueue(
            self.host,
            self.backing,
            self.host_cache,
            tracer,
            in_flight_bytes=config.prefetch_bytes,
            weight_of=config.weight_of,
        )
        self._demand_reads = DemandReads(self.host, self.backing, self.host_cache, self.queue)
        self._lock_fd = lock_fd
        self._catalog = catalog
        self._catalog_thread = catalog_thread
        self._damage_log = damage_log
        tiles = TilePool(self.host)
        self._fixed_bytes = self.host.arena.header_bytes + tiles.nbytes
        self.reader = RangeReader(self.host, self.backing, tiles)
        self._jobs = jobs
        self._job_registry = JobRegistry(
            jobs, self.host, self.backing, self.host_cache, tiles.nbytes, config.units_of_a_rank_alone
        )
        self._compute = ThreadPoolExecutor(
            config.optimizer_threads, "optimizer", initializer=_begin_to_compute, initargs=(config.worker_nice,)
        )
        transformer = Transformer(self.host, self.backing, self.host_cache, tiles, self._compute)
        copies = CopyWrites(self.host, self.backing, self.host_cache)
        self._committer = Committer(self.backing, self.host_cache, copies, tracer, catalog, catalog_thread.run)
        self._pending_steps = PendingSteps(
            self.host, self.backing, self.host_cache, tracer, transformer, self._committer
        )
        self.scratch = ScratchRanges(self.host)
        self.scrubber = Scrubber(self.nvme, self._durable_versions, config.scrub_bytes_per_second)

    @classmethod
    async def open(cls, config: EngineConfig, volatile: Sequence[BackingTier[Any]] = ()) -> Engine:
        """Opens a state directory, creating it if it is not there, and finds every committed step of every job.

        Args:
            volatile: tiers beside the two that `config` describes, fastest first, which are not durable. A slab may be
                placed on one by its name. The engine closes them; where this raises, they stay the caller's.

        Raises:
            DeviceError: the directory cannot be made or used.
            ConflictError: another daemon has it, or its format is unknown.
            BudgetExceededError: a budget is smaller than what it must hold.
            DiskFullError: the machine has not that much shared memory, or the disk is full.
            DataLossError: the files are damaged.
        """
        syscalls.make_directory(config.state_dir)
        async with AsyncExitStack() as undo:
            lock_fd = syscalls.lock_file(config.state_dir / LOCK)
            undo.callback(os.close, lock_fd)
            catalog = Catalog(config.state_dir / CATALOG)
            undo.callback(catalog.close)
            stored = catalog.load()
            used = [e for job in stored for steps in job.versions.values() for v in steps.values() for e in v.extents]
            jobs, tracer, catalog_thread = JobTable(), Tracer(), CatalogThread()
            damage_log = DamageLog(jobs, catalog, catalog_thread)
            tiers = await open_tiers(config, catalog, used, volatile=volatile, tracer=tracer, on_damage=damage_log.note)
            undo.push_async_callback(tiers.nvme.close)
            undo.push_async_callback(tiers.host.close)
            undo.push_async_callback(tiers.backing.watch.close)
            engine = cls(config, lock_fd, tiers, jobs, tracer, catalog, catalog_thread, damage_log)
            engine._job_registry.restore(stored)
            undo.pop_all()
        return engine

    async def close(self) -> None:
        """Finishes what must be finished, abandons the pending steps, and lets go of everything."""
        await self.scrubber.close()
        for job in list(self._jobs):
            try:
                await self._quiesce(job)
            except StorageError as error:
                # Nothing is used again after this, so nothing depends on it.
                log.error("the unfinished step of job %s could not be given up: %s", job.spec.name, error)
        await self.queue.close()
        await self.backing.close()
        await self._damage_log.close()
        self._compute.shutdown()
        # SQLite brings its journal into the file here, which a busy disk makes slow.
        await self._catalog_thread.run(self._catalog.close)
        self._catalog_thread.close()
        await self.host.close()
        os.close(self._lock_fd)

    @property
    def arena(self) -> Arena:
        """The memory that clients map."""
        return self.host.arena

    @property
    def tiers(self) -> Sequence[Tier]:
        """All tiers, fastest first; what only the host tier or the NVMe tier has is at `host` and `nvme`."""
        return (self.host, *self.backing)

    def _durable_versions(self) -> Iterator[Region]:
        versions = (region for job in self._jobs for slab in job.slabs() for region in slab.versions.values())
        return (region for region in versions if region.tier is self.backing.durable)

    def accounts(
        self, *, leased: Iterable[ArenaRange] = (), quarantined: Iterable[ArenaRange] = ()
    ) -> list[TierAccount]:
        """Explain every used byte of each tier by its holder; walks through all slabs.

        Args:
            leased: ranges that sessions have leased.
            quarantined: ranges that processes of ended sessions may still write to.
        """
        slabs = [slab for job in self._jobs for slab in job.slabs()]
        host = host_account(
            self.host,
            self.host_cache,
            self.scratch,
            fixed_bytes=self._fixed_bytes,
            slabs=slabs,
            leased=leased,
            quarantined=quarantined,
        )
        return [host, *backing_accounts(self.backing, slabs, self._job_registry.admission.readers)]

    # --- jobs

    @property
    def jobs(self) -> Mapping[str, Job]:
        """All jobs, by name, in their newest committed layouts."""
        return self._jobs.by_name

    def job(self, name: str) -> Job:
        """Raises NotFoundError for a job that is not here."""
        return self._jobs.job(name)

    def layouts(self, name: str) -> list[Job]:
        """The job in each of its layouts, oldest first: those that the newest committed one has replaced and that are
        not freed yet, that one, and one that is being filled.

        Raises:
            NotFoundError: there is no such job.
        """
        return self._jobs.layouts(name)

    async def open_job(self, spec: JobSpec, *, may_exist: bool, must_exist: bool) -> Job:
        """The job, created in memory if it has no committed step. Abandons the step that an earlier run left behind.

        A caller that names a layout gets the job as it is stored, whatever its world size and types are then, and uses
        it so if it can, or calls `lay_out`.

        Raises:
            AlreadyExistsError: it has committed steps and `may_exist` is false.
            NotFoundError: it has none and `must_exist` is true.
            ConflictError: it was stored with another layout, world size or durability, or is being deleted.
        """
        known = self._job_registry.find(spec, may_exist=may_exist, must_exist=must_exist)
        if known is not None:
            await self.backing.watch.unless_stuck(self._quiesce_all(known))
            if known.newest is None:
                await self._job_registry.discard(known)
        return self._job_registry.attach(spec)

    async def lay_out(self, job: Job, spec: JobSpec, first_step: int) -> Job:
        """The job in another layout, `spec.layout`, without groups or bytes: its first commit, of step `first_step`,
        takes the place of the present layout at once, which is kept until all ranks everywhere have that commit.

        What a run leaves behind without that commit is discarded. A job without commits just begins with that step.

        Raises:
            ConflictError: the job has a layout of that name, was deleted, or is being deleted.
        """
        await self.backing.watch.unless_stuck(self._quiesce_all(job))
        return await self._job_registry.lay_out(job, spec, first_step)

    async def delete_job(self, name: str) -> None:
        """Forgets a job in all its layouts, and frees all that it has.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it is being deleted already.
            DeviceStuckError: a device does not answer; the job stays.
        """
        with self._job_registry.deleting(name) as job:
            await self.backing.watch.unless_stuck(self._quiesce_all(job))
            await self._delete(self._jobs.layouts(name))

    async def _delete(self, jobs: Sequence[Job]) -> None:
        if stored := [job.spec.identity for job in jobs if job.durable]:
            await self._catalog_thread.run(lambda: self._catalog.delete_jobs(stored))
        for job in jobs:
            await self._job_registry.discard(job)

    async def register(self, job: Job, specs: Sequence[GroupSpec], limits: Sequence[Limit] = ()) -> None:
        """Declares groups of a job, and reserves the room that its next step needs. Called once per rank.

        Raises:
            InvalidRequestError: a group is malformed.
            ConflictError: the job has other groups, or a placement changed that cannot be changed.
            BudgetExceededError: a budget or one of the limits is too small; nothing new is registered then.
        """
        moved = await self._job_registry.register(job, specs, limits)
        if moved and job.durable:
            await self._catalog_thread.run(lambda: self._catalog.set_placements(moved))

    async def detach(self, job: Job) -> None:
        """To be called when no client uses the job any more: its unfinished step is abandoned, and host memory that
        holds nothing unique is given back."""
        await self.abandon_pending(job)
        if job.begins_layout:
            await self._job_registry.discard(job)
        else:
            await self._job_registry.detach(job)

    async def _quiesce_all(self, job: Job) -> None:
        """As `_quiesce`; what was being filled to replace the job is discarded."""
        if (filling := job.unfinished_successor) is not None:
            await self.abandon_pending(filling)
            await self._job_registry.discard(filling)
        await self._quiesce(job)

    async def _quiesce(self, job: Job) -> None:
        await self.abandon_pending(job)
        if job.snapshot is not None:
            await asyncio.wait([job.snapshot])

    # --- reads and writes

    async def fetch(self, job: Job, group: str, kind: Kind, position: float = NEVER, as_of: int | None = None) -> Pin:
        """Pins the newest bytes of a slab in the arena; waits for the update that writes them.

        Args:
            as_of: the last committed step, or the pending one: the bytes as that step leaves them. None: the newest,
                committed or not. A step before the last committed one counts as that one.

        Raises:
            ConflictError: the job has no committed step yet.
            StepAbortedError: that update failed or was abandoned.
            DeviceStuckError: a device does not answer, and the bytes are not here.
            BudgetExceededError: what others hold left no room for it before the deadline.
        """
        slab = job.slab(group, kind)
        if job.newest is None:
            raise ConflictError(f"{slab.key} cannot be read yet: commit the initial values as step 0 first")
        return Pin(slab, await self._demand_reads.fetch(job, slab, position, as_of))

    def prefetch(self, owner: str, job: Job, wants: Iterable[tuple[str, Kind, float]]) -> None:
        """Replaces the prefetch window of `owner`: (group, kind, trace position) of what it will need soon.

        What an update under way is about to replace is fetched when that is done: its old bytes are of no use.

        Raises:
            NotFoundError: for a slab that the job does not have.
        """
        slabs = [(job.slab(group, kind), position) for group, kind, position in wants]
        writes = job.pending.writes if job.pending else {}
        later = {slab: write for slab, _ in slabs if (write := writes.get(slab)) is not None and not write.done()}
        self.queue.replace_window(owner, slabs, later)

    def end_prefetch(self, owner: str) -> None:
        """Drops the prefetch window of `owner`."""
        self.queue.replace_window(owner, [])

    def unpin(self, pin: Pin, next_use: float = NEVER) -> None:
        """Gives a pin back; `next_use` is the trace position at which the slab is needed again."""
        self.host_cache.unpin(pin.slab, pin.copy, next_use)

    async def stage(self, job: Job, group: str, kind: Kind) -> Pin:
        """Room in the arena for the bytes of a slab at its job's first step, to be filled, then published or unpinned.

        Raises:
            ConflictError: the job has committed steps; its bytes change through updates only.
            BudgetExceededError: what others hold left no room for it before the deadline.
        """
        slab = job.slab(group, kind)
        job.open_pending(job.first_step).check_open()
        if slab.copy is None:
            region = await self.host_cache.room_for(slab)
            if slab.copy is not None:
                self.host.free(region)
                raise ConflictError(f"{slab.key} is being written by another lease")
            slab.copy = HostCopy(region, step=None, at_home=slab.at_home_in_host)
        elif slab.copy.pins:
            raise ConflictError(f"{slab.key} is being written by another lease")
        # What was published before is about to be overwritten here, and stays valid only where it is on NVMe too.
        slab.copy.step = None
        if not slab.backed:
            slab.latest = None
        self.host_cache.pin(slab.copy)
        return Pin(slab, slab.copy)

    async def publish(self, pin: Pin) -> None:
        """Makes staged bytes the slab's version of its job's first step, to be committed, and unpins them.

        Raises:
            ConflictError: that step is committed already, or being committed.
            StepAbortedError: it was abandoned while the bytes were written.
            DeviceStuckError: a device does not answer; they become that version when it does.
        """
        await self.backing.watch.unless_stuck(self._publish(pin))

    async def _publish(self, pin: Pin) -> None:
        slab = pin.slab
        try:
            job = self._jobs.holder(slab.key)
            step = job.first_step
            pending = job.open_pending(step)
            async with AsyncExitStack() as filling:
                if slab.backing is not None:
                    new = self.backing.new_version(slab.backing, slab.nbytes, slab.label(step))
                    region = await filling.enter_async_context(new)
                    await region.tier.write_from(region, 0, self.host.view(pin.region))
                # Not before: while the bytes were written a commit may have come, or the end of the step or the job.
                job.open_pending(step).check_open()
                if job.pending is not pending:
                    raise StepAbortedError(f"the first step of job {job.spec.name!r} was abandoned; begin it again")
                if slab.backed and (old := slab.add_version(step, region)) is not None:
                    self.backing.free(old)
            slab.latest = step
            pin.copy.step = step
        finally:
            self.host_cache.unpin(slab, pin.copy)

    async def allocate_put(self, job: Job, step: int, group: str, kind: Kind) -> ArenaRange:
        """Room for the bytes that `put` will give a slab at a step after the first, until then or until it is freed.

        Raises:
            ConflictError: it is not the next step, or the slab was written in it already.
            BudgetExceededError: what others hold left no room for it before the deadline.
        """
        slab = job.slab(group, kind)
        self._pending_steps.check_put(job, step, slab)
        return await self.scratch.allocate(job.spec.name, slab.nbytes)

    async def put(self, job: Job, step: int, group: str, kind: Kind, staged: ArenaRange) -> None:
        """Makes staged bytes the slab's version of the pending step, which keeps the committed one; consumes the range.

        Returns when they are on NVMe. A slab that is in host memory only gets them when `commit` is called. `commit`
        reports a failure, too.

        Raises:
            ConflictError: see `allocate_put`.
            StepAbortedError: the step was abandoned.
            BudgetExceededError: nvme_budget or the disk has no room for them.
            DeviceError: they cannot be written.
            DeviceStuckError: a device does not answer; they are the slab's when it does.
        """
        try:
            slab = job.slab(group, kind)
            write = self._pending_steps.put(job, step, slab, staged)
        except StorageError:
            self.scratch.free(staged)
            raise
        write.add_done_callback(lambda done: self._end_put(staged, done))
        if slab.backed:
            await self.backing.watch.unless_stuck(_outcome(write))

    def _end_put(self, staged: ArenaRange, write: asyncio.Task[None]) -> None:
        if write.cancelled() or write.exception() is not None:
            self.scratch.free(staged)
        else:
            self.scratch.let_go(staged)

    async def allocate_gradient(self, job: Job, group: str) -> ArenaRange:
        """Room for the gradient of a group, until it is consumed by `update` or freed.

        Raises:
            ConflictError: the group is frozen.
            BudgetExceededError: what others hold left no room for it before the deadline.
        """
        spec = job.group(group).spec
        if Kind.GRAD not in spec.slab_of_kind:
            raise ConflictError(
                f"group {group!r} of job {job.spec.name!r} is frozen: it was registered without a gradient"
            )
        return await self.scratch.allocate(job.spec.name, spec.slab_bytes(Kind.GRAD), from_top=True)

    def abandon_stage(self, pin: Pin) -> ArenaRange:
        """Takes a slab's staged bytes away from it, as if they had never been.

        A process may still write to the range: the caller gives it to `HostTier.free` when none does any more.
        """
        return self.host_cache.surrender(pin.slab, pin.copy)

    async def load(self, job: Job, nbytes: int, fill: Callable[[memoryview], Awaitable[None]]) -> ArenaRange:
        """A range of the arena, on account of a job, that `fill` has filled (see StepReader.fill), until it is freed.

        Raises:
            BudgetExceededError: what others hold left no room for it before the deadline.
            DeviceStuckError: a device does not answer.
            StorageError: what `fill` raises.
        """
        return await self.backing.watch.unless_stuck(self._load(job, nbytes, fill), give_back=self.scratch.free)

    async def _load(self, job: Job, nbytes: int, fill: Callable[[memoryview], Awaitable[None]]) -> ArenaRange:
        region = await self.scratch.allocate(job.spec.name, nbytes)
        try:
            await fill(self.host.view(region))
        except BaseException:
            self.scratch.free(region)
            raise
        return region

    async def open_reader(self, job: Job, step: int | None = None) -> StepReader:
        """A committed step (the newest one), held whole until the reader is closed, while training goes on.

        What is in host memory only is written to NVMe for it.

        Raises:
            NotFoundError: the step is not retained.
            DataLossError: some of its bytes were kept in host memory only, and are gone.
            BudgetExceededError: nvme_budget has no room to keep it beside the steps to come.
            DeviceStuckError: a device does not answer.
        """
        return await self.backing.watch.unless_stuck(self._open_reader(job, step), give_back=StepReader.close)

    async def _open_reader(self, job: Job, step: int | None) -> StepReader:
        # A step that is being committed overwrites what is in host memory only. When this wakes, the next commit may
        # have begun already.
        while job.tally.has_unbacked and job.pending is not None and not job.pending.at_rest.is_set():
            await job.pending.at_rest.wait()
        wanted = job.newest if step is None else step
        if wanted is None:
            raise ConflictError(f"job {job.spec.name!r} has no committed step to read yet")
        self._committer.check_retained(job, wanted)
        self._job_registry.admission.reserve_for_reader(job)
        reader = StepReader(job, job.retained[wanted], self.reader, self.backing)
        # From here on all that is held for the reader is the reader's, and goes with it.
        self._job_registry.admission.readers.add(reader)
        try:
            await self._committer.hold(job, wanted, reader.regions)
        except BaseException:
            reader.close()
            raise
        return reader

    # --- steps

    def check_update(self, job: Job, step: int, group: str) -> None:
        """Raises ConflictError unless `update` would take this group in this step now."""
        self._pending_steps.check_update(job, step, group)

    def update(
        self,
        job: Job,
        step: int,
        group: str,
        gradient: ArenaRange,
        kernel: Kernel,
        *,
        position: float = NEVER,
        keeps_gradient: bool = False,
    ) -> asyncio.Task[None]:
        """Schedules the update of a group to version `step`; consumes the gradient. `commit` reports its failure.

        An update of slabs that are in host memory only begins when `commit` is called: until then its step can still be
        abandoned, and their old bytes are nowhere else.

        Args:
            position: of the updates that wait, the one with the lowest is next.
            keeps_gradient: the gradient stays the caller's, who leaves it alone until the update is done or withdrawn.

        Raises:
            ConflictError: see `check_update`.
        """
        update = self._pending_steps.update(job, step, group, gradient, kernel, position)
        if not keeps_gradient:
            self.free_gradient(gradient, update)
        return update

    def free_gradient(self, gradient: ArenaRange, update: asyncio.Task[None]) -> None:
        """Frees a gradient as soon as its update is done with it."""
        # Not at its end: one that is cancelled before it begins never gets there.
        update.add_done_callback(lambda _: self.scratch.free(gradient))

    async def withdraw(self, job: Job, step: int, group: str) -> None:
        """Undoes the update of a group in the pending step, if there is one: the group is as the last committed step
        left it, and may be updated again.

        Raises:
            ConflictError: it is not the pending step, or is being committed.
            DeviceStuckError: a device does not answer; it is undone when it does.
        """
        await self.backing.watch.unless_stuck(self._pending_steps.withdraw(job, step, group))

    async def commit(self, job: Job, step: int, client_states: Mapping[int, bytes], settled: int) -> bool:
        """Waits for what the step writes and makes it the newest committed one; returns whether it is durable already.

        From here on the step is finished whoever dies. `settled` is the newest step that all ranks everywhere have.

        Raises:
            ConflictError: the step is not the next one, or initial values are missing.
            StorageError: the last snapshot failed, which this commit, tried again, leaves behind; or an update failed:
                `roll_back` is then the only way on.
            DeviceStuckError: a device does not answer. A commit that had begun goes on when it does: ask for the newest
                step then.
        """
        self.backing.watch.check()
        return await self.backing.watch.unless_stuck(self._commit(job, step, client_states, settled))

    async def _commit(self, job: Job, step: int, client_states: Mapping[int, bytes], settled: int) -> bool:
        durable = await self._pending_steps.commit(job, step, client_states, settled)
        self._job_registry.succeed(job)
        if job.older and job.settled >= job.first_step:
            try:
                await self._delete(list(job.older))
            except StorageError:
                # The step is committed. The next commit tries again.
                log.exception("the former layout of job %s is not freed yet", job.spec.name)
        return durable

    async def roll_back(self, job: Job, step: int) -> None:
        """Makes a committed step the newest one again, and abandons the pending step.

        Raises:
            NotFoundError: the step is not retained.
            DataLossError: some of its bytes were kept in host memory only, and are gone.
            DeviceStuckError: a device does not answer; the job goes back when it does.
        """
        self._committer.check_retained(job, step)
        await self.backing.watch.unless_stuck(self._pending_steps.roll_back(job, step))

    async def abandon_pending(self, job: Job) -> None:
        """Stops the writes of an unfinished step and discards what they wrote. A commit under way is waited for."""
        await self._pending_steps.abandon(job)


async def _outcome(write: asyncio.Task[None]) -> None:
    """Waits for a write of a step, which goes on by itself when this is cancelled; raises its failure."""
    await asyncio.wait([write])
    if write.cancelled():
        raise StepAbortedError(
            "the step was abandoned while its bytes were written; resume from the last committed one"
        )
    write.result()


def _begin_to_compute(nice: int) -> None:
    begin_work(nice)
    torch.set_num_threads(1)
