"""The entry point of the storage engine: jobs, reads, writes, updates, commit and roll-back over the storage tiers.

This module owns the state directory: its lock file, its catalog and its data files. The engine must be called on one
event loop only, because nothing protects its state against other threads. It must never overwrite committed bytes on a
backing tier.
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
from storage.accounts import Accountant, Holder, Ranges, TierAccount
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
from storage.errors import BudgetExceededError, ConflictError, StepAbortedError, StorageError
from storage.gradients import Gradients
from storage.host_cache import HostCache
from storage.job_registry import JobRegistry
from storage.job_table import JobTable
from storage.kept_steps import KeptSize, KeptSteps
from storage.open_files import OpenFiles
from storage.parkable import Activation, Gradient, Parkable
from storage.pending_steps import PendingSteps
from storage.prefetch import PrefetchQueue
from storage.reader import RangeReader, StepReader
from storage.renewal import Renewal
from storage.scratch import ScratchRanges
from storage.scrub import Scrubber
from storage.shadows import Shadows
from storage.shard import GroupSpec, JobSpec, Kind, SlabKey
from storage.slab import NEVER, HostCopy, Slab
from storage.threads import begin_work
from storage.tiers.arena import Arena, ArenaRange
from storage.tiers.contract import BackingTier, Region, Tier
from storage.tiers.gpu import GpuTier
from storage.tiers.lender import Lender
from storage.tracing import Tracer
from storage.transform import Kernel, TilePool, Transformer
from storage.upkeep import HeldStep, Upkeep, versions_on
from storage.versions import Job

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A slab's bytes in the arena, which stay in their place until `Engine.unpin` or `Engine.publish` releases them."""

    slab: Slab
    copy: HostCopy

    @property
    def arena_range(self) -> ArenaRange:
        """The range of the arena that holds the bytes."""
        return self.copy.arena_range


class Engine:
    """An open state directory with its tiers and jobs."""

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
        """Connect the parts of the engine. Only `open` calls this."""
        self.config = config
        self.host = tiers.host
        self.nvme = tiers.nvme
        self.gpu = GpuTier()
        self.backing = tiers.backing
        self.remote = tiers.backing.remote
        self.lent = tiers.lent
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
        self.reader = RangeReader(self.host, self.host_cache, self.backing, tiles)
        self._jobs = jobs
        self.scratch = ScratchRanges(self.host)
        self.gradients = Gradients(self.host, self.backing, self.scratch, self._room_for_parked)
        self._job_registry = JobRegistry(
            jobs,
            self.host,
            self.backing,
            self.host_cache,
            self.gradients,
            tiles.nbytes,
            config.units_of_a_rank_alone,
            config.gradients_of_a_rank,
        )
        self._compute = ThreadPoolExecutor(
            config.optimizer_threads, "optimizer", initializer=_begin_to_compute, initargs=(config.worker_nice,)
        )
        transformer = Transformer(
            self.host,
            self.backing,
            self.host_cache,
            self.gradients,
            tiles,
            self._compute,
            config.optimizer_threads,
        )
        copies = CopyWrites(self.host, self.backing, self.host_cache)
        renewal = Renewal(
            self.host,
            self.backing,
            self.host_cache,
            jobs,
            lambda: [reader.regions for reader in self._job_registry.admission.readers],
        )
        self._committer = Committer(self.backing, self.host_cache, copies, renewal, tracer, catalog, catalog_thread.run)
        self.shadows = Shadows(self.host, self.scratch, self._job_registry.admission.room_beside_steps)
        self._pending_steps = PendingSteps(
            self.host, self.backing, self.host_cache, tracer, transformer, self.shadows, self._committer
        )
        self._kept_steps = KeptSteps(
            jobs, self._job_registry, self.backing, self._committer, renewal, catalog, catalog_thread.run
        )
        self.scrubber = Scrubber(self.nvme, self._durable_versions, config.scrub_bytes_per_second)
        self._accountant = Accountant(
            jobs,
            self.host,
            self.backing,
            self.host_cache,
            self.scratch,
            self.gradients,
            lambda: self._job_registry.admission.readers,
            self.lent,
            fixed_bytes=self.host.arena.header_bytes + tiles.nbytes,
        )
        self.upkeep = Upkeep(jobs, self.backing, self.host_cache, self.queue, self.scrubber)

    @classmethod
    async def open(
        cls,
        config: EngineConfig,
        volatile: Sequence[BackingTier[Any]] = (),
        lenders: Sequence[Lender] = (),
        on_lender: Callable[[str, str], None] = lambda _address, _text: None,
    ) -> Engine:
        """Open a state directory, create it if it does not exist, and restore every committed step of every job.

        Args:
            volatile: backing tiers in addition to the NVMe tier, fastest first, whose bytes a restart loses. A slab is
                placed on one by its name. The engine closes these tiers; if this method raises, the caller closes them.
            lenders: other daemons of which memory is borrowed; the engine closes them, too.
            on_lender: called with a lender's address and a sentence when the lender is lost or there again.

        Raises:
            DeviceError: the directory cannot be made or used.
            ConflictError: another daemon has locked the directory, or its format is unknown.
            BudgetExceededError: a budget is smaller than what it must hold.
            DiskFullError: the machine has too little shared memory, or the disk is full.
            DataLossError: the files are damaged.
        """
        syscalls.make_directory(config.state_dir, "--state-dir")
        async with AsyncExitStack() as undo:
            lock_fd = syscalls.lock_file(config.state_dir / LOCK)
            undo.callback(os.close, lock_fd)
            files = OpenFiles()
            files.add(config.state_dir / LOCK)
            catalog = Catalog(config.state_dir / CATALOG, files)
            undo.callback(catalog.close)
            stored = catalog.load()
            versions = (v for job in stored for steps in job.versions.values() for v in steps.values())
            # Each extent once, because a kept step shares versions with its job.
            used = list(dict.fromkeys(extent for version in versions for extent in version.extents))
            jobs, tracer, catalog_thread = JobTable(), Tracer(), CatalogThread()
            damage_log = DamageLog(jobs, catalog, catalog_thread, config.on_damage)
            tiers = await open_tiers(
                config,
                catalog,
                used,
                volatile=volatile,
                lenders=lenders,
                on_lender=on_lender,
                tracer=tracer,
                on_damage=damage_log.note,
            )
            undo.push_async_callback(tiers.nvme.close)
            for file in tiers.nvme.files:
                # Without its lock, a directory could be opened by a second daemon, which would write to the same file.
                files.add(file.path.with_name(LOCK))
                files.add(file.path)
            undo.push_async_callback(tiers.host.close)
            undo.push_async_callback(tiers.backing.watch.close)
            engine = cls(config, lock_fd, tiers, jobs, tracer, catalog, catalog_thread, damage_log)
            engine._job_registry.restore(stored)
            undo.pop_all()
        if engine.remote is not None:
            engine.remote.start()
        return engine

    async def close(self) -> None:
        """Abandon the pending steps, wait for commits and snapshots under way, and close the tiers and files."""
        await self.scrubber.close()
        self.lent.close()
        for job in list(self._jobs):
            try:
                await self._quiesce(job)
            except StorageError as error:
                # No caller uses the engine after `close`, so a step that could not be abandoned does no harm: the next
                # start discards it.
                log.error("the unfinished step of job %s could not be abandoned: %s", job.spec.name, error)
        await self._kept_steps.close()
        await self.gradients.close()
        await self.queue.close()
        await self.backing.close()
        await self._damage_log.close()
        self._compute.shutdown()
        # SQLite copies its journal into the database file here, which is slow on a busy disk, so the catalog's thread
        # does it.
        await self._catalog_thread.run(self._catalog.close)
        self._catalog_thread.close()
        await self.host.close()
        os.close(self._lock_fd)

    @property
    def arena(self) -> Arena:
        """The shared memory that clients map."""
        return self.host.arena

    @property
    def tiers(self) -> Sequence[Tier]:
        """All tiers, fastest first; the gpu tier only if a session has offered memory of its device.

        The remote tier is there only if lenders are configured. `gpu`, `host`, `remote` and `nvme` give the same tiers
        with their own types.
        """
        remote = [] if self.remote is None else [self.remote]
        return (*([self.gpu] if self.gpu.is_in_use else []), self.host, *remote, *self.backing)

    def _durable_versions(self) -> Iterator[Region]:
        """Return the regions of all versions on the durable tier."""
        return versions_on(self.backing.durable, (*self._jobs, *self._jobs.all_kept()))

    async def held_steps(self, name: str) -> Sequence[HeldStep]:
        """Return the steps of a job that the store holds; see `Upkeep.steps`."""
        # A closed reader holds no regions, and is in the set until no session refers to it any more.
        readers = [reader for reader in self._job_registry.admission.readers if reader.regions]
        return await self.upkeep.steps(name, readers)

    async def accounts(
        self,
        *,
        leased: Ranges = lambda: (),
        quarantined: Ranges = lambda: (),
        spilled: Callable[[], Iterable[Region]] = lambda: (),
    ) -> list[TierAccount]:
        """Return for each tier which holder uses how many of its bytes. This visits all slabs, in slices.

        Args:
            leased: returns the ranges of the arena that sessions have leased.
            quarantined: returns the ranges to which processes of ended sessions may still write.
            spilled: returns the regions of the spilled gradients that sessions have leased.
        """
        accounts = await self._accountant.take(leased, quarantined, spilled)
        if self.remote is not None:
            used = self.remote.used_bytes
            remote = TierAccount(tier=self.remote.name, used_bytes=used, held_bytes={Holder.JOBS: used})
            accounts.insert(1, remote)
        return [self._gpu_account(), *accounts] if self.gpu.is_in_use else accounts

    def _gpu_account(self) -> TierAccount:
        """Return who holds the device memory that sessions have offered: leases, and copies of slabs."""
        used, leased = self.gpu.used_bytes, self.gpu.leased_bytes
        return TierAccount(
            tier=self.gpu.name, used_bytes=used, held_bytes={Holder.JOBS: used - leased, Holder.LEASES: leased}
        )

    # --- jobs

    @property
    def jobs(self) -> Mapping[str, Job]:
        """All jobs by name, each in its newest committed layout."""
        return self._jobs.by_name

    def job(self, name: str) -> Job:
        """Return a job in its newest committed layout.

        Raises:
            NotFoundError: the store has no job of this name.
        """
        return self._jobs.job(name)

    def settled_layout(self, name: str) -> Job:
        """Return a job in the newest layout that has a settled step; if there is none, in its newest committed layout.

        Raises:
            NotFoundError: the store has no job of this name.
        """
        job = self.job(name)
        layouts = [layout for layout in (*job.older, job) if layout.settled_step is not None]
        return layouts[-1] if layouts else job

    def layouts(self, name: str) -> list[Job]:
        """Return a job in each of its layouts, oldest first.

        These are the older layouts that are not freed yet, the newest committed layout, and the layout that is being
        filled to replace it, if there is one.

        Raises:
            NotFoundError: the store has no job of this name.
        """
        return self._jobs.layouts(name)

    async def open_job(self, spec: JobSpec, *, may_exist: bool, must_exist: bool, goes_on: bool = False) -> Job:
        """Return the job for a new run, and abandon the step that an earlier run left unfinished.

        If `goes_on` is true, an unfinished step of the same layout is not abandoned, and the new run can finish it.

        A job without a committed step is created anew, in memory. If `spec` names a layout, the stored job is returned
        even if its world size, partition or types differ: the caller then either uses the stored layout or calls
        `lay_out`.

        Raises:
            AlreadyExistsError: the job has committed steps and `may_exist` is false.
            NotFoundError: the job has no committed step and `must_exist` is true.
            ConflictError: the job was stored with another layout, world size or durability, or is being deleted.
        """
        if goes_on and (unfinished := self._job_registry.unfinished(spec)) is not None:
            return unfinished
        known = self._job_registry.find(spec, may_exist=may_exist, must_exist=must_exist)
        self.gradients.reserved_for_activations.pop(spec.name, None)
        if known is not None:
            await self.backing.watch.unless_stuck(self._quiesce_all(known))
            # The job is looked up again, because a commit that was under way may have given it its first step or
            # another layout.
            found = self._job_registry.find(spec, may_exist=may_exist, must_exist=must_exist)
            if found is known and known.newest is None:
                await self._job_registry.free(known)
        return self._job_registry.attach(spec)

    async def lay_out(self, job: Job, spec: JobSpec, first_step: int) -> Job:
        """Return the job in a new layout, `spec.layout`, which has no groups and no bytes yet.

        The first commit of the new layout has the number `first_step`. From that commit on the new layout is the job's;
        the old one is freed when all ranks on all nodes have the commit. If the run ends before its first commit, the
        new layout is freed. A job without any commit keeps its layout and only takes `first_step` as the number of its
        first step; if it has that number already, the bytes that were staged for it stay.

        Raises:
            ConflictError: the job has a layout of that name, was deleted, or is being deleted.
        """
        if job.newest is None and job.pending is not None and job.first_step == first_step:
            return job
        await self.backing.watch.unless_stuck(self._quiesce_all(job))
        return await self._job_registry.lay_out(job, spec, first_step)

    def check_budgets(self, host_budget_bytes: int, nvme_budget_bytes: int) -> None:
        """Raise BudgetExceededError if an engine with these budgets could not carry the jobs that there are now."""
        self._job_registry.admission.check_budgets(host_budget_bytes, nvme_budget_bytes)

    async def delete_job(self, name: str) -> None:
        """Delete a job with all its layouts and kept steps, and free its bytes in all tiers.

        Raises:
            NotFoundError: the store has no job of this name.
            ConflictError: the job is being deleted already.
            DeviceStuckError: a device does not answer; the job remains.
        """
        with self._job_registry.deleting(name) as job:
            if job is not None:
                await self.backing.watch.unless_stuck(self._quiesce_all(job))
            layouts = [] if job is None else self._jobs.layouts(name)
            await self._kept_steps.delete_job(name, [layout.spec.identity for layout in layouts if layout.durable])
            for layout in layouts:
                await self._job_registry.free(layout)
            self.queue.forget_job(name)

    # --- kept steps

    def kept_steps(self, name: str) -> Mapping[str, Job]:
        """Return the kept steps of a job by their names, each as a job without ranks that has one commit."""
        return self._jobs.kept_steps(name)

    @property
    def jobs_with_kept_steps(self) -> Iterable[str]:
        """The names of the jobs of which steps are kept. Such a job may have nothing else."""
        return list(self._jobs.kept)

    async def kept_sizes(self, name: str) -> Mapping[str, KeptSize]:
        """Return the size of each kept step of a job, by its name. This visits all slabs of the job."""
        return await self._kept_steps.sizes(name)

    def kept_step(self, name: str, kept: str) -> Job:
        """Return one kept step of a job. Raise NotFoundError if the job keeps no step under that name."""
        return self._kept_steps.find(name, kept)

    async def keep(self, job: Job, step: int | None, name: str, *, note: str = "", limits: Sequence[Limit] = ()) -> Job:
        """Keep a committed step under a name until `forget`, whatever is trained, rolled back or laid out meanwhile.

        The step is durable when this returns, also if no commit of the job is. Bytes that are only in host memory are
        written to NVMe first; bytes on NVMe are not copied. A repeated call has no effect.

        Args:
            step: the step; None: the newest settled one.
            note: what the caller says about the step, for operators.
            limits: the most bytes that the jobs of some names may use.

        Returns:
            The kept step, as a job without ranks whose only commit is the step.

        Raises:
            NotFoundError: the step is not retained.
            AlreadyExistsError: another step of the job has the name.
            DataLossError: some of the step's bytes were kept in host memory only, and are overwritten.
            BudgetExceededError: nvme_budget or a limit has no room to keep the step beside the steps to come.
            ConflictError: the job was deleted meanwhile, or has no settled step.
            DeviceStuckError: a device does not answer; the step is kept as soon as it does.
        """
        return await self.backing.watch.unless_stuck(self._keep(job, step, name, note, limits))

    async def _keep(self, job: Job, step: int | None, name: str, note: str, limits: Sequence[Limit]) -> Job:
        wanted = self._default_step(job) if step is None else step
        if (known := self._kept_steps.known(job, wanted, name)) is not None:
            return known
        try:
            reader = await self._open_reader(job, wanted)
            try:
                self._job_registry.admission.check_kept(reader, limits)
            except BaseException:
                reader.close()
                raise
        except BudgetExceededError as error:
            raise BudgetExceededError(
                f"step {wanted} of job {job.spec.name!r} cannot be kept: {error}; or forget kept steps "
                "(`paramserver-admin forget`)"
            ) from error
        return await self._kept_steps.keep(reader, name, note)

    async def forget(self, name: str, kept: str) -> None:
        """Forget a kept step of a job, and free the bytes that neither the job nor another kept step needs.

        Raises:
            NotFoundError: the job keeps no step under that name.
            DeviceStuckError: a device does not answer; the step is forgotten as soon as it does.
        """
        await self.backing.watch.unless_stuck(self._kept_steps.forget(name, kept))

    async def register(self, job: Job, specs: Sequence[GroupSpec], limits: Sequence[Limit] = ()) -> None:
        """Register groups of a job, and reserve the room that the job's next step needs. Each rank calls this once.

        Raises:
            InvalidRequestError: a group is malformed.
            ConflictError: the job has a group of that name with other shards or types, cannot change a placement now,
                or is not in the store any more.
            BudgetExceededError: a budget or one of the limits is too small; then no group of the call is registered.
        """
        moved = await self._job_registry.register(job, specs, limits)
        if moved and job.durable:
            await self._catalog_thread.run(lambda: self._catalog.set_placements(moved))

    async def end_run(self, job: Job, *, forgets: bool = False) -> None:
        """Abandon a job's unfinished step, and free the host memory that holds no unique bytes.

        The caller calls this when no client uses the job any more. A new layout without a commit is freed. If `forgets`
        is true, a job without a commit is freed, too.
        """
        await self.abandon_pending(job)
        if job.begins_layout or (forgets and job.newest is None):
            await self._job_registry.free(job)
            return
        await self._job_registry.free_copies(job)
        # Readers wait no longer for steps that this run has not settled.
        job.announce()
        try:
            await self._committer.record_settled(job)
        except StorageError:
            # No step is lost by this. The next run of the job settles its newest step again.
            log.exception("the catalog does not know yet which step of job %s is settled", job.spec.name)

    async def _quiesce_all(self, job: Job) -> None:
        """Quiesce a job, and free the layout that was being filled to replace its newest one.

        If the first commit of that layout was under way and succeeds, the layout is the job's newest one afterwards.
        """
        filling = job.successor
        if filling is not None and self._jobs.by_name.get(job.spec.name) is job:
            await self.abandon_pending(filling)
            # The commit is finished only now, and from then on the catalog names the layout.
            if filling.newest is None:
                await self._job_registry.free(filling)
            else:
                await self._quiesce(filling)
        await self._quiesce(job)

    async def _quiesce(self, job: Job) -> None:
        """Abandon the job's pending step, and wait for its snapshot and for a roll-back under way."""
        async with job.rolling_back:
            await self.abandon_pending(job)
        if job.snapshot is not None:
            await asyncio.wait([job.snapshot])

    # --- reads and writes

    async def fetch(self, job: Job, group: str, kind: Kind, position: float = NEVER, as_of: int | None = None) -> Pin:
        """Return the newest bytes of a slab, pinned in the arena; wait for the update that is writing them.

        Args:
            position: the trace position at which the caller needs the bytes.
            as_of: a step, either the last committed one or the pending one: return the bytes as this step leaves them.
                For a step before the last committed one, the bytes of the last committed one are returned. None: return
                the newest bytes, committed or not.

        Raises:
            ConflictError: the job has no committed step yet, or the bytes as of the last one were in host memory only,
                and the commit under way has replaced them.
            StepAbortedError: the update failed or was abandoned.
            DeviceStuckError: a device does not answer, and the bytes are not in host memory.
            BudgetExceededError: other bytes in use left no room for the slab before the deadline.
        """
        slab = job.slab(group, kind)
        if job.newest is None:
            raise ConflictError(f"{slab.key} cannot be read yet: commit the initial values as step 0 first")
        return Pin(slab, await self._demand_reads.fetch(job, slab, position, as_of))

    def newest_slab(self, job: Job, group: str, kind: Kind, as_of: int | None) -> Slab | None:
        """Return a slab if `fetch` would return its newest bytes without waiting for a write; else None.

        Raises:
            NotFoundError: the job has no such slab.
        """
        slab = job.slab(group, kind)
        return slab if self._demand_reads.sees_newest(job, slab, as_of) else None

    def prefetch(self, owner: str, job: Job, wants: Iterable[tuple[str, Kind, float]]) -> None:
        """Replace the prefetch window of `owner`: the slabs, as (group, kind, trace position), that it will need soon.

        If an update is writing a slab, the slab is fetched when the update is done, because the old bytes are of no
        use.

        Raises:
            NotFoundError: the job does not have one of the slabs.
        """
        slabs = [(job.slab(group, kind), position) for group, kind, position in wants]
        writes = job.pending.writes if job.pending else {}
        running = {slab: write for slab, _ in slabs if (write := writes.get(slab)) is not None and not write.done()}
        self.queue.replace_window(owner, slabs, running)

    def end_prefetch(self, owner: str) -> None:
        """Remove the prefetch window of `owner`."""
        self.queue.replace_window(owner, [])

    def unpin(self, pin: Pin, next_use: float = NEVER) -> None:
        """Release a pin. `next_use` is the trace position at which the slab is needed again."""
        self.host_cache.unpin(pin.slab, pin.copy, next_use)

    async def stage(self, job: Job, group: str, kind: Kind) -> Pin:
        """Return pinned room in the arena for the bytes of a slab at its job's first step.

        The caller writes all elements of the group there, in the slab's dtype, and then calls `publish`, or `unpin` to
        discard them.

        Raises:
            ConflictError: the job has committed steps, so its bytes change through updates only; or another lease
                writes the slab.
            BudgetExceededError: other bytes in use left no room for the slab before the deadline.
        """
        slab = job.slab(group, kind)
        job.open_pending(job.first_step).check_open()
        if slab.copy is None:
            range_ = await self.host_cache.room_for(slab)
            if slab.copy is not None:
                self.host.free(range_)
                raise ConflictError(f"{slab.key} is being written by another lease")
            slab.copy = HostCopy(range_, step=None, at_home=slab.at_home_in_host)
        elif slab.copy.pins:
            raise ConflictError(f"{slab.key} is being written by another lease")
        # A new write overwrites the bytes that an earlier `publish` left in this copy, so that version stays valid only
        # if it is on a backing tier, too.
        if not slab.backed:
            slab.latest = None
        self.host_cache.pin_to_write(slab.copy)
        return Pin(slab, slab.copy)

    async def publish(self, pin: Pin) -> None:
        """Make staged bytes the slab's version of its job's first step, and unpin them.

        Raises:
            ConflictError: that step is committed already, or being committed.
            StepAbortedError: the step was abandoned while the bytes were written.
            DeviceStuckError: a device does not answer; the bytes become that version as soon as it does.
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
                    filling.enter_context(slab.filling(region))
                    await region.tier.write_from(region, 0, self.host.view(pin.arena_range))
                    if step in slab.versions:
                        # The bytes that were published before are freed below. A commit that failed may name them
                        # after a crash.
                        await self._committer.resolve_doubt()
                # Check after the write, because the step may have been committed or abandoned, or the job deleted,
                # while the bytes were written.
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
        """Return room in the arena for the bytes that `put` gives a slab at a step after the first.

        The range belongs to the caller until the caller passes it to `put` or frees it.

        Raises:
            ConflictError: `step` is not the next step, or the slab was written in it already.
            StepAbortedError: the job is being rolled back.
            BudgetExceededError: other bytes in use left no room for the slab before the deadline.
        """
        slab = job.slab(group, kind)
        self._pending_steps.check_put(job, step, slab)
        return await self.scratch.allocate(job.spec.name, slab.nbytes)

    async def put(self, job: Job, step: int, group: str, kind: Kind, staged: ArenaRange) -> None:
        """Make staged bytes the slab's version of the pending step.

        The engine takes the range `staged` over: on success it becomes the slab's host copy, on failure it is freed.
        The version of the last committed step is kept beside the new one. This returns when the bytes are on the slab's
        backing tier. A slab without a backing tier takes the bytes only when `commit` is called. `commit` reports a
        failed put, too.

        Raises:
            ConflictError: see `allocate_put`.
            StepAbortedError: the step was abandoned.
            BudgetExceededError: nvme_budget or the disk has no room for the bytes.
            DeviceError: the bytes cannot be written.
            DeviceStuckError: a device does not answer; the slab takes the bytes as soon as it does.
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
            self.scratch.hand_over(staged)

    async def allocate_gradient(self, job: Job, group: str) -> Gradient:
        """Return room in the arena for the gradient of a group, until `update` consumes it or the caller frees it.

        Raises:
            ConflictError: the group is frozen.
            BudgetExceededError: other bytes in use left no room for the gradient before the deadline.
            StorageError: gradients had to be spilled to make room, and this failed.
        """
        spec = job.group(group).spec
        if Kind.GRAD not in spec.slab_of_kind:
            raise ConflictError(
                f"group {group!r} of job {job.spec.name!r} is frozen: it was registered without a gradient"
            )
        # While a step is being committed, the gradient is for the one after it.
        step = job.next_step + (job.pending is not None and job.pending.sealed.is_set())
        key = SlabKey(job.spec.identity, group, Kind.GRAD)
        return await self.gradients.allocate(job.spec.name, key, job.group(group), step)

    async def allocate_activation(self, job: Job, holder: str, nbytes: int) -> Activation:
        """Return room in the arena for an activation of a client's forward, until the caller frees it.

        Args:
            job: the job.
            holder: the id of the client's session.
            nbytes: its size.

        Raises:
            BudgetExceededError: other bytes in use left no room before the deadline.
            StorageError: gradients had to be spilled to make room, and this failed.
        """
        return await self.gradients.allocate_activation(job.spec.name, holder, nbytes)

    def admit_activation(
        self, job: Job, nbytes: int, limits: Iterable[Limit] = (), *, parks: bool, is_held: bool = False
    ) -> int | None:
        """Return how many bytes of activations each rank may have without parking them; see `Admission`.

        Args:
            job: the job.
            nbytes: the size of the activation that is asked for.
            limits: the most bytes that the jobs of some names may use.
            parks: whether the ranks of the job park gradients.
            is_held: whether the store has the activation already, and brings it back.

        Returns:
            The bytes; None: there is no room for the activation, on any tier.
        """
        return self._job_registry.admission.admit_activation(job, nbytes, limits, parks=parks, is_held=is_held)

    async def recall(self, memory: Parkable) -> None:
        """Bring a parked gradient or activation back to the arena; see `Gradients.recall`.

        Raises:
            DeviceStuckError: a device does not answer; the gradient is back as soon as it does.
        """
        await self.backing.watch.unless_stuck(self.gradients.recall(memory))

    def must_park(self, job: Job, limits: Iterable[Limit] = ()) -> bool:
        """Return whether the gradients of a job are to be parked, because those of a step may not all fit.

        Args:
            limits: the most bytes that the jobs of some names may use.
        """
        return self._job_registry.admission.must_park(job, limits)

    def _room_for_parked(self) -> int:
        return self._job_registry.admission.room_for_parked(self.config.prefetch_bytes)

    def take_staged(self, pin: Pin) -> ArenaRange:
        """Discard a slab's staged bytes, and return the range of the arena that they had.

        A client's process may still write to the range, so the caller passes it to `HostTier.free` only when no process
        can.
        """
        return self.host_cache.take_range(pin.slab, pin.copy)

    async def digest(self, job: Job, group: str, kind: Kind) -> tuple[int | None, bytes]:
        """Return the newest version of a slab, committed or not, and the digest of its bytes; see RangeReader.digest.

        Raises:
            NotFoundError: the job has no such slab.
            DataLossError, DeviceError: the bytes are damaged, or cannot be read.
            DeviceStuckError: a device does not answer.
        """
        return await self.reader.digest(job, group, kind)

    async def load(self, job: Job, nbytes: int, fill: Callable[[memoryview], Awaitable[None]]) -> ArenaRange:
        """Return a range of the arena that `fill` has filled. The range is charged to the job until it is freed.

        Args:
            job: the job.
            nbytes: the bytes that are wanted; the range has whole pages.
            fill: fills the view of the range that it gets. An example is `StepReader.fill`.

        Raises:
            BudgetExceededError: other bytes in use left no room for the range before the deadline.
            DeviceStuckError: a device does not answer.
            StorageError: `fill` has raised this.
        """
        return await self.backing.watch.unless_stuck(self._load(job, nbytes, fill), release=self.scratch.free)

    async def _load(self, job: Job, nbytes: int, fill: Callable[[memoryview], Awaitable[None]]) -> ArenaRange:
        range_ = await self.scratch.allocate(job.spec.name, nbytes)
        try:
            await fill(self.host.view(range_))
        except BaseException:
            self.scratch.free(range_)
            raise
        return range_

    async def open_reader(self, job: Job, step: int | None = None, *, unsettled: bool = False) -> StepReader:
        """Return a reader of a committed step, by default the newest settled one.

        The step's bytes are held until the reader is closed, while training goes on. Bytes that are only in host memory
        are written to NVMe first.

        Args:
            job: the job.
            step: the step; None: the newest settled one.
            unsettled: without `step`, the newest step of this store, although other nodes may lack it.

        Raises:
            NotFoundError: the step is not retained.
            ConflictError: there is no such step yet.
            DataLossError: some of the step's bytes were kept in host memory only, and are overwritten.
            BudgetExceededError: nvme_budget has no room to keep the step beside the steps to come.
            DeviceStuckError: a device does not answer.
        """
        opening = self._open_reader(job, step, unsettled=unsettled)
        return await self.backing.watch.unless_stuck(opening, release=StepReader.close)

    async def _open_reader(self, job: Job, step: int | None, *, unsettled: bool = False) -> StepReader:
        await self._until_whole(job, settled=step is None and not unsettled)
        wanted = self._default_step(job, unsettled=unsettled) if step is None else step
        self._committer.check_retained(job, wanted)
        self._job_registry.admission.reserve_for_reader(job)
        reader = StepReader(job, job.retained[wanted], self.reader, self.backing)
        # From here on the admission counts the regions that the reader holds, and `close` frees them.
        self._job_registry.admission.readers.add(reader)
        try:
            reader.versions = await self._committer.hold(job, wanted, reader.regions)
        except BaseException:
            reader.close()
            raise
        return reader

    async def _until_whole(self, job: Job, *, settled: bool) -> None:
        """Wait while the commit of a step overwrites bytes of the one before that are only in host memory.

        With `settled`, the newest settled step is to be read: if its bytes are overwritten, wait until the trainers
        have settled the next one, or have gone.
        """
        # This is a loop because the next commit may have begun before this task runs again.
        while job.tally.has_unbacked:
            if job.pending is not None and not job.pending.at_rest.is_set():
                await job.pending.at_rest.wait()
            elif settled and job.spec.local_ranks and job.settled_step != self._committer.newest_settled(job):
                await job.changed.wait()
            else:
                return

    def _default_step(self, job: Job, *, unsettled: bool = False) -> int:
        """Return the newest settled step of a job; with `unsettled`, the newest one of this store.

        Raises:
            ConflictError: there is none.
        """
        step = job.newest if unsettled else self._committer.newest_settled(job)
        if step is None and job.newest is None:
            raise ConflictError(f"job {job.spec.name!r} has no committed step yet")
        if step is None:
            raise ConflictError(
                f"job {job.spec.name!r} is at step {job.newest} on this node, and no step is known to be on all of its "
                "nodes: start the job, which finds the newest step that all of them have, or name a step"
            )
        return step

    # --- steps

    def check_update(self, job: Job, step: int, group: str) -> None:
        """Check that `update` would accept this group in this step now.

        Raises:
            ConflictError: it would not.
            StepAbortedError: the job is being rolled back.
        """
        self._pending_steps.check_update(job, step, group)

    def update(
        self,
        job: Job,
        step: int,
        group: str,
        gradient: Gradient,
        kernel: Kernel,
        *,
        position: float = NEVER,
        keeps_gradient: bool = False,
        aside: bool = False,
    ) -> asyncio.Task[None]:
        """Start the update of a group to version `step`, and return its task. `commit` reports a failed update.

        The gradient is freed when the update is done, and may be parked or spilled meanwhile. If a slab of the group is
        in host memory only, the update waits until `commit` is called, or goes `aside`: before that the step can still
        be abandoned, and the update would overwrite the only bytes of the last committed step.

        Args:
            job: the job.
            step: the pending step.
            group: the name of the group.
            gradient: its gradient for this step, with the values; the client writes to it no more.
            kernel: called in an optimizer thread for each part of the group, whose `Tile` it updates in place.
            position: the trace position of the group. Among the updates that wait, the one with the lowest position
                runs next.
            keeps_gradient: the caller frees the gradient itself, after the update is done or withdrawn.
            aside: an update of bytes in host memory need not wait for the commit where there is room for its result,
                see shadows.py. It takes one and a half times the processor time then.

        Raises:
            ConflictError, StepAbortedError: see `check_update`.
        """
        update = self._pending_steps.update(job, step, group, gradient, kernel, position, aside=aside)
        if not keeps_gradient:
            self.free_gradient(gradient, update)
        return update

    def free_gradient(self, gradient: Gradient, update: asyncio.Task[None]) -> None:
        """Free a gradient as soon as its update is done."""
        # A callback frees the gradient, and not the end of the update, because an update that is cancelled before it
        # begins does not run to its end.
        update.add_done_callback(lambda _: self.gradients.free(gradient))

    async def withdraw(self, job: Job, step: int, group: str) -> None:
        """Undo the update of a group in the pending step, if there is one.

        Afterwards the group is as the last committed step left it, and may be updated again.

        Raises:
            ConflictError: `step` is not the pending step, or is being committed.
            DeviceStuckError: a device does not answer; the update is undone as soon as it does.
        """
        await self.backing.watch.unless_stuck(self._pending_steps.withdraw(job, step, group))

    async def commit(self, job: Job, step: int, client_states: Mapping[int, bytes], settled: int | None) -> bool:
        """Wait for the writes of a step and make it the newest committed one; return whether it is durable already.

        From here on the step is finished even if ranks die.

        Args:
            client_states: the state that each rank of this node stores with the step, by rank.
            settled: the newest step that all ranks on all nodes have committed; None: none is known. It is this step
                where all ranks are on this node.

        Raises:
            ConflictError: the step is not the next one, or initial values are missing.
            StepAbortedError: the job is being rolled back.
            StorageError: the last snapshot failed, and the same commit may be tried again; or an update failed, and
                only `roll_back` can follow.
            DeviceStuckError: a device does not answer. A commit that had begun goes on as soon as it does: the caller
                then asks for the newest step.
        """
        self.backing.watch.check()
        return await self.backing.watch.unless_stuck(self._commit(job, step, client_states, settled))

    async def _commit(self, job: Job, step: int, client_states: Mapping[int, bytes], settled: int | None) -> bool:
        durable = await self._pending_steps.commit(job, step, client_states, settled)
        self._job_registry.succeed(job)
        if job.older and job.settled is not None and job.settled >= job.first_step:
            try:
                await self._free_layouts(list(job.older))
            except StorageError as error:
                # The commit itself has succeeded, so this error does not end it. The next commit frees the former
                # layout.
                log.error("the former layout of job %s is not freed yet: %s", job.spec.name, error)
        return durable

    async def _free_layouts(self, layouts: Sequence[Job]) -> None:
        """Delete former layouts of a job from the catalog, and then free their bytes in all tiers."""
        if stored := [layout.spec.identity for layout in layouts if layout.durable]:
            await self._catalog_thread.run(lambda: self._catalog.delete_jobs(stored))
        for layout in layouts:
            await self._job_registry.free(layout)

    def steps_to_return_to(self, job: Job) -> list[int]:
        """Return the committed steps that `roll_back` can make the newest one again, oldest first."""
        return [step for step in sorted(job.retained) if self._committer.has_whole(job, step)]

    async def amend(self, job: Job, step: int, rank: int, state: bytes) -> None:
        """Replace the client state that a rank has stored with the newest committed step.

        It is as durable as the step when this returns. Whatever happens meanwhile, the step has the former state or the
        new one. Readers that are open keep what they have, and so do steps that are kept under a name.

        Args:
            job: the job.
            step: the step.
            rank: a rank that has stored a state with the step.
            state: the new state.

        Raises:
            ConflictError: it is not the newest step, or the rank has no state in it.
            DeviceStuckError: a device does not answer.
        """
        if step != job.newest or rank not in job.retained[step].client_states:
            raise ConflictError(
                f"rank {rank} cannot amend step {step} of job {job.spec.name!r}: the newest step here is {job.newest}"
            )
        await self.backing.watch.unless_stuck(self._committer.amend(job, step, rank, state))

    def settle(self, job: Job, step: int) -> None:
        """Take note that every rank on every node has committed a step, so that readers may have it.

        Raises:
            ConflictError: this store has not committed the step.
        """
        if job.newest is None or step > job.newest:
            raise ConflictError(
                f"step {step} of job {job.spec.name!r} cannot be settled: the newest step here is {job.newest}"
            )
        job.note_settled(step)
        job.announce()

    async def record_settled(self, job: Job) -> None:
        """Have the catalog know the newest durable step of a job that is settled. The next commit would do it, too.

        Raises:
            DeviceStuckError: a device does not answer.
            StorageError: the catalog cannot be written.
        """
        await self.backing.watch.unless_stuck(self._committer.record_settled(job))

    def check_roll_back(self, job: Job, step: int) -> None:
        """Raise what `roll_back` would raise at once, if it would not accept this step."""
        self._job_registry.check_not_deleting(job.spec.name)
        self._committer.check_retained(job, step)

    async def roll_back(self, job: Job, step: int, *, is_ordered: bool = False) -> None:
        """Make a committed step the newest one again, and abandon the pending step.

        Args:
            job: the job.
            step: the step.
            is_ordered: whether an operator gives up all newer steps, also those that other stores have. The catalog
                records that, even if this store has no newer step.

        Raises:
            NotFoundError: the step is not retained.
            ConflictError: the job is being deleted.
            DataLossError: some of the step's bytes were kept in host memory only, and are overwritten.
            DeviceStuckError: a device does not answer; the roll-back is done as soon as it does.
        """
        self.check_roll_back(job, step)
        await self.backing.watch.unless_stuck(self._pending_steps.roll_back(job, step, is_ordered=is_ordered))

    async def abandon_pending(self, job: Job) -> None:
        """Stop the writes of an unfinished step and discard their results. A commit under way is finished first."""
        await self._pending_steps.abandon(job)


async def _outcome(write: asyncio.Task[None]) -> None:
    """Wait for a write of a step, and raise its failure. The write goes on if this call is cancelled."""
    await asyncio.wait([write])
    if write.cancelled():
        raise StepAbortedError(
            "the step was abandoned while its bytes were written; resume from the last committed one"
        )
    write.result()


def _begin_to_compute(nice: int) -> None:
    begin_work(nice)
    torch.set_num_threads(1)
