"""The entry point of the storage engine: its parts, connected, and the life of jobs from their first step to their end.

For all other work, callers use the engine's parts directly: `pins` reads and stages slabs, `pending_steps` updates and
puts them, `step_readers` and `kept_steps` hold committed steps. This module owns the state directory: its lock file,
its catalog and its data files. The engine must be called on one event loop only, because nothing protects its state
against other threads. It must never overwrite committed bytes on a backing tier.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import torch

from storage.assembly import Tiers, open_tiers
from storage.base import syscalls
from storage.base.config import EngineConfig
from storage.base.errors import ConflictError, StorageError
from storage.base.open_files import OpenFiles
from storage.base.shard import GroupSpec, JobSpec
from storage.base.threads import begin_work
from storage.base.tracing import Tracer
from storage.catalog.catalog import Catalog
from storage.catalog.thread import CatalogThread
from storage.jobs.accounts import Accountant
from storage.jobs.admission import Admission, Limit
from storage.jobs.directories import CATALOG, LOCK
from storage.jobs.job_registry import JobRegistry
from storage.jobs.kept_steps import KeptSteps
from storage.jobs.step_readers import StepReaders
from storage.jobs.upkeep import Upkeep, versions_on
from storage.memory.copy_writes import CopyWrites
from storage.memory.gradients import Gradients
from storage.memory.host_cache import HostCache
from storage.memory.prefetch import PrefetchQueue
from storage.memory.scratch import ScratchRanges
from storage.memory.shadows import Shadows
from storage.state.job_table import JobTable
from storage.state.versions import Job
from storage.steps.commit import Committer
from storage.steps.damage_log import DamageLog
from storage.steps.pending_steps import PendingSteps
from storage.steps.pins import SlabPins
from storage.steps.reader import RangeReader
from storage.steps.renewal import Renewal
from storage.steps.scrub import Scrubber
from storage.steps.transform import TilePool, Transformer
from storage.tiers.contract import BackingTier, CopyTier, Tier
from storage.tiers.gpu import GpuTier

log = logging.getLogger(__name__)


class Engine:
    """The storage engine of one open state directory, with its tiers and jobs.

    A daemon has one engine. It carries out the requests of all clients.
    """

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
        self.jobs = jobs
        self.tracer = tracer
        self.host = host = tiers.host
        self.backing = backing = tiers.backing
        self.nvme, self.gpu, self.lent = tiers.nvme, GpuTier(), tiers.lent
        self.host_cache = host_cache = HostCache(host, tiers.eviction_order)
        self.queue = PrefetchQueue(
            host, backing, host_cache, tracer, in_flight_bytes=config.prefetch_bytes, weight_of=config.weight_of
        )
        tiles = TilePool(host)
        self.reader = RangeReader(host, host_cache, backing, tiles)
        self.scratch = ScratchRanges(host)
        self.gradients = Gradients(
            host, backing, self.scratch, lambda: self.admission.room_for_parked(config.prefetch_bytes)
        )
        ranks = config.units_of_a_rank_alone, config.gradients_of_a_rank
        self.admission = Admission(jobs, host, backing, self.gradients, tiles.nbytes, *ranks)
        self._registry = JobRegistry(jobs, host, backing, host_cache, self.admission)
        self._lock_fd = lock_fd
        self._damage_log = damage_log
        self._catalog, self._catalog_thread = catalog, catalog_thread
        self._compute = ThreadPoolExecutor(
            config.optimizer_threads, "optimizer", initializer=_begin_to_compute, initargs=(config.worker_nice,)
        )
        transformer = Transformer(
            host, backing, host_cache, self.gradients, tiles, self._compute, config.optimizer_threads
        )
        copies = CopyWrites(host, backing, host_cache)
        open_readers = self.admission.readers
        renewal = Renewal(host, backing, host_cache, jobs, lambda: [reader.regions for reader in open_readers])
        committer = Committer(backing, host_cache, copies, renewal, tracer, catalog, catalog_thread.run)
        self._committer = committer
        self.shadows = Shadows(host, self.scratch, self.admission.room_beside_steps)
        self.pins = SlabPins(host, backing, host_cache, self.scratch, self.queue, jobs, committer)
        self.pending_steps = PendingSteps(
            host, backing, host_cache, self.scratch, self.gradients, tracer, transformer, self.shadows, committer
        )
        self.step_readers = StepReaders(host, backing, self.scratch, self.reader, self.admission, committer)
        self.kept_steps = KeptSteps(
            jobs, self._registry, self.step_readers, backing, committer, renewal, catalog, catalog_thread.run
        )
        self.scrubber = Scrubber(
            self.nvme, lambda: versions_on(self.nvme, (*jobs, *jobs.all_kept())), config.scrub_bytes_per_second
        )
        self.accountant = Accountant(
            jobs,
            host,
            backing,
            host_cache,
            self.scratch,
            self.gradients,
            open_readers,
            self.lent,
            self.gpu,
            fixed_bytes=host.arena.header_bytes + tiles.nbytes,
        )
        self.upkeep = Upkeep(jobs, backing, host_cache, self.queue, self.scrubber, open_readers)

    @classmethod
    async def open(
        cls,
        config: EngineConfig,
        volatile: Sequence[BackingTier[Any]] = (),
        copies: Sequence[CopyTier[Any]] = (),
    ) -> Engine:
        """Open a state directory, create it if it does not exist, and restore every committed step of every job.

        Args:
            volatile: backing tiers in addition to the NVMe tier, fastest first, whose bytes a restart loses. A slab is
                placed on one by its name. The engine closes these tiers; if this method raises, the caller closes them.
            copies: tiers with copies of versions on the NVMe tier, fastest first. The engine closes these tiers, also
                if this method raises.

        Raises:
            DeviceError: the directory cannot be made or used.
            ConflictError: another daemon has locked the directory, or its format is unknown.
            BudgetExceededError: a budget is smaller than what it must hold.
            DiskFullError: the machine has too little shared memory, or the disk is full.
            DataLossError: the files are damaged.
        """
        async with AsyncExitStack() as undo:
            for tier in copies:
                undo.push_async_callback(tier.close)
            syscalls.make_directory(config.state_dir, "--state-dir")
            lock_fd = syscalls.lock_file(config.state_dir / LOCK)
            undo.callback(os.close, lock_fd)
            files = OpenFiles()
            files.add(config.state_dir / LOCK)
            catalog = Catalog(config.state_dir / CATALOG, files)
            undo.callback(catalog.close)
            stored = catalog.load()
            versions = (v for job in stored for steps in job.versions.values() for v in steps.values())
            # Each extent is listed once (by `dict.fromkeys`), because a kept step and its job may name the same
            # extents.
            used = list(dict.fromkeys(extent for version in versions for extent in version.extents))
            jobs, tracer, catalog_thread = JobTable(), Tracer(), CatalogThread()
            damage_log = DamageLog(jobs, catalog, catalog_thread, config.on_damage)
            tiers = await open_tiers(
                config,
                catalog,
                used,
                volatile=volatile,
                copies=copies,
                tracer=tracer,
                on_damage=damage_log.note,
            )
            undo.push_async_callback(tiers.nvme.close)
            for file in tiers.nvme.files:
                # The lock file of each data directory must stay at its path, because without it a second daemon could
                # open the directory and write to the same data file.
                files.add(file.path.with_name(LOCK))
                files.add(file.path)
            undo.push_async_callback(tiers.host.close)
            undo.push_async_callback(tiers.backing.watch.close)
            engine = cls(config, lock_fd, tiers, jobs, tracer, catalog, catalog_thread, damage_log)
            engine._registry.restore(stored)
            undo.pop_all()
        for tier in copies:
            tier.start()
        return engine

    async def close(self) -> None:
        """Abandon the pending steps, wait for commits and snapshots under way, and close the tiers and files."""
        await self.scrubber.close()
        self.lent.close()
        for job in list(self.jobs):
            try:
                await self._quiesce(job)
            except StorageError as error:
                # No caller uses the engine after `close`, so a step that could not be abandoned does no harm: the next
                # start discards it.
                log.error("the unfinished step of job %s could not be abandoned: %s", job.spec.name, error)
        await self.kept_steps.close()
        await self.gradients.close()
        await self.queue.close()
        await self.backing.close()
        await self._damage_log.close()
        self._compute.shutdown()
        # Closing the catalog makes SQLite copy its log into the database file, which is slow on a busy disk. So the
        # catalog's thread closes it, and the event loop goes on.
        await self._catalog_thread.run(self._catalog.close)
        self._catalog_thread.close()
        await self.host.close()
        os.close(self._lock_fd)

    @property
    def tiers(self) -> Sequence[Tier]:
        """All tiers, fastest first; the gpu tier only if a session has offered memory of its device.

        The engine's attributes `gpu`, `host` and `nvme` are the same tiers with their own types.
        """
        return (*([self.gpu] if self.gpu.is_in_use else []), self.host, *self.backing.copies, *self.backing)

    # --- jobs

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
        if goes_on and (unfinished := self._registry.unfinished(spec)) is not None:
            return unfinished
        known = self._registry.find(spec, may_exist=may_exist, must_exist=must_exist)
        self.gradients.reserved_for_activations.pop(spec.name, None)
        if known is not None:
            await self.backing.watch.unless_stuck(self._quiesce_all(known))
            # The job is looked up again, because a commit that was under way may have given it its first step or
            # another layout.
            found = self._registry.find(spec, may_exist=may_exist, must_exist=must_exist)
            if found is known and known.newest is None:
                await self._registry.free(known)
        return self._registry.attach(spec)

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
        return await self._registry.lay_out(job, spec, first_step)

    async def delete_job(self, name: str) -> None:
        """Delete a job with all its layouts and kept steps, and free its bytes in all tiers.

        Raises:
            NotFoundError: the store has no job of this name.
            ConflictError: the job is being deleted already.
            DeviceStuckError: a device does not answer; the job remains.
        """
        with self._registry.deleting(name) as job:
            if job is not None:
                await self.backing.watch.unless_stuck(self._quiesce_all(job))
            layouts = [] if job is None else self.jobs.layouts(name)
            await self.kept_steps.delete_job(name, [layout.spec.identity for layout in layouts if layout.durable])
            for layout in layouts:
                await self._registry.free(layout)
            self.queue.forget_job(name)

    async def register(self, job: Job, specs: Sequence[GroupSpec], limits: Sequence[Limit] = ()) -> None:
        """Register groups of a job, and reserve the room that the job's next step needs. Each rank calls this once.

        Raises:
            InvalidRequestError: a group is malformed.
            ConflictError: the job has a group of that name with other shards or types, cannot change a placement now,
                or is not in the store any more.
            BudgetExceededError: a budget or one of the limits is too small; then no group of the call is registered.
        """
        moved = await self._registry.register(job, specs, limits)
        if moved and job.durable:
            await self._catalog_thread.run(lambda: self._catalog.set_placements(moved))

    async def end_run(self, job: Job, *, forgets: bool = False) -> None:
        """Abandon a job's unfinished step, and free the host memory that holds no unique bytes.

        The caller calls this when no client uses the job any more. A new layout without a commit is freed. If `forgets`
        is true, a job without a commit is freed, too.
        """
        await self.pending_steps.abandon(job)
        if job.begins_layout or (forgets and job.newest is None):
            await self._registry.free(job)
            return
        await self._registry.free_copies(job)
        # Wake the readers that wait for a settled step: the job has no rank any more that could settle a further step,
        # so they stop waiting.
        job.announce()
        try:
            await self._committer.record_settled(job)
        except StorageError:
            # A failure to record the settled step loses no step, because the next run of the job settles the job's
            # newest step again.
            log.exception("the catalog does not know yet which step of job %s is settled", job.spec.name)

    async def _quiesce_all(self, job: Job) -> None:
        """Quiesce all layouts of a job (see `_quiesce`), and free the layout that was to replace the newest one.

        If the first commit of that layout was under way and succeeds, the layout is the job's newest one afterwards.
        """
        filling = job.successor
        if filling is not None and self.jobs.by_name.get(job.spec.name) is job:
            await self.pending_steps.abandon(filling)
            # `abandon` has waited for the commit of the new layout's first step, if one was under way. If that commit
            # succeeded, the catalog names the new layout, so this layout is not freed.
            if filling.newest is None:
                await self._registry.free(filling)
            else:
                await self._quiesce(filling)
        await self._quiesce(job)

    async def _quiesce(self, job: Job) -> None:
        """Abandon the job's pending step, and wait for its snapshot and for a roll-back under way."""
        async with job.rolling_back:
            await self.pending_steps.abandon(job)
        if job.snapshot is not None:
            await asyncio.wait([job.snapshot])

    # --- steps

    async def commit(self, job: Job, step: int, client_states: Mapping[int, bytes], settled: int | None) -> bool:
        """Wait for the writes of a step and make it the newest committed one; return whether it is durable already.

        From this call on, the store finishes the step even if ranks die.

        Args:
            client_states: the state that each rank of this node stores with the step, by rank.
            settled: the newest step that all ranks on all nodes have committed, or None if none is known. If all ranks
                are on this node, it is `step`.

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
        durable = await self.pending_steps.commit(job, step, client_states, settled)
        self._registry.succeed(job)
        if job.older and job.settled is not None and job.settled >= job.first_step:
            try:
                await self._free_layouts(list(job.older))
            except StorageError as error:
                # The step is committed even if freeing the former layout fails, so this error is logged and not raised.
                # The next commit frees the former layout.
                log.error("the former layout of job %s is not freed yet: %s", job.spec.name, error)
        return durable

    async def _free_layouts(self, layouts: Sequence[Job]) -> None:
        """Delete former layouts of a job from the catalog, and then free their bytes in all tiers."""
        if stored := [layout.spec.identity for layout in layouts if layout.durable]:
            await self._catalog_thread.run(lambda: self._catalog.delete_jobs(stored))
        for layout in layouts:
            await self._registry.free(layout)

    def steps_to_return_to(self, job: Job) -> list[int]:
        """Return the committed steps that `roll_back` can make the newest one again, oldest first."""
        return [step for step in sorted(job.retained) if self._committer.has_whole(job, step)]

    async def amend(self, job: Job, step: int, rank: int, state: bytes) -> None:
        """Replace the client state that a rank has stored with the newest committed step.

        When this returns, the new state is as durable as the step. If the daemon dies before, the step has either the
        former state or the new one. Open readers of the step and kept steps keep the former state.

        Args:
            job: the job.
            step: the number of the job's newest committed step.
            rank: a rank that has stored a state with the step.
            state: the new state.

        Raises:
            ConflictError: it is not the newest step, a newer one is being committed, or the rank has no state in it.
            DeviceStuckError: a device does not answer.
        """
        if step != job.newest or rank not in job.retained[step].client_states:
            raise ConflictError(
                f"rank {rank} cannot amend step {step} of job {job.spec.name!r}: the newest step here is {job.newest}"
            )
        await self.backing.watch.unless_stuck(self._committer.amend(job, step, rank, state))

    def settle(self, job: Job, step: int) -> None:
        """Mark a step as settled, because every rank on every node has committed it. From then on readers may open it.

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
        """Record in the catalog the newest durable step of a job that is settled. The next commit would record it, too.

        Raises:
            DeviceStuckError: a device does not answer.
            StorageError: the catalog cannot be written.
        """
        await self.backing.watch.unless_stuck(self._committer.record_settled(job))

    def check_roll_back(self, job: Job, step: int) -> None:
        """Raise an error if `roll_back` would refuse this step: the error that it would raise before any change."""
        self._registry.check_not_deleting(job.spec.name)
        self._committer.check_retained(job, step)

    async def roll_back(self, job: Job, step: int, *, is_ordered: bool = False) -> None:
        """Make a committed step the newest one again, and abandon the pending step.

        Args:
            job: the job.
            step: the number of the step.
            is_ordered: whether an operator gives up all newer steps, also those that other stores have. If so, the
                catalog records the roll-back, even if this store has no newer step.

        Raises:
            NotFoundError: the step is not retained.
            ConflictError: the job is being deleted.
            DataLossError: some of the step's bytes were kept in host memory only, and are overwritten.
            DeviceStuckError: a device does not answer; the roll-back is done as soon as it does.
        """
        self.check_roll_back(job, step)
        await self.backing.watch.unless_stuck(self.pending_steps.roll_back(job, step, is_ordered=is_ordered))


def _begin_to_compute(nice: int) -> None:
    begin_work(nice)
    torch.set_num_threads(1)
