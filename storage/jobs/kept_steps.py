"""Kept steps: committed steps that a client has named, and that stay whole until a client forgets them.

A kept step shares with its job the regions of the versions that the step consists of, so keeping a step copies no bytes
that are on NVMe already. In memory and in the catalog it is a job of its own with one commit: later commits, roll-backs
and new layouts of the original job do not change it. This module owns the order of the changes: the regions are held
and synced before the catalog names the kept step, and freed after the catalog has forgotten it. When a job is deleted,
this module must never leave one of its kept steps behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from storage.base.errors import AlreadyExistsError, BudgetExceededError, ConflictError, NotFoundError, StorageError
from storage.base.shard import SlabKey
from storage.base.slices import in_slices
from storage.base.waiting import unlogged
from storage.catalog.catalog import Catalog
from storage.catalog.records import StoredVersion
from storage.jobs.admission import Limit
from storage.jobs.job_registry import JobRegistry
from storage.jobs.step_readers import StepReaders
from storage.state.job_table import JobTable
from storage.state.versions import Job
from storage.steps.commit import Committer, InCatalogThread
from storage.steps.reader import StepReader
from storage.steps.renewal import Renewal
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import Region

log = logging.getLogger(__name__)

# The most kept steps of one job, so that a list of them fits into one message.
MOST_KEPT = 1000


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSize:
    """The bytes of a kept step on NVMe, and how many of them (`alone_bytes`) forgetting the step would free."""

    nbytes: int
    alone_bytes: int


class KeptSteps:
    """Keeps committed steps under names, and forgets them, for all jobs of one engine.

    A checkpoint of a client refers to a kept step.
    """

    def __init__(
        self,
        jobs: JobTable,
        registry: JobRegistry,
        readers: StepReaders,
        backing: BackingTiers,
        committer: Committer,
        renewal: Renewal,
        catalog: Catalog,
        in_catalog_thread: InCatalogThread,
    ) -> None:
        self._jobs = jobs
        self._registry = registry
        self._readers = readers
        self._backing = backing
        self._committer = committer
        self._renewal = renewal
        self._catalog = catalog
        self._in_catalog_thread = in_catalog_thread
        # This lock is held while the catalog and the table of kept steps change, so that both always have the same kept
        # steps.
        self._changing = asyncio.Lock()
        # Readers whose regions are freed as soon as no transaction is in doubt. A transaction whose COMMIT failed may
        # become valid after a crash, and the step that it keeps would then need the regions.
        self._in_doubt: list[StepReader] = []
        self._under_way: set[asyncio.Task[Any]] = set()

    def find(self, job: str, name: str) -> Job:
        """Return a kept step of a job. Raise NotFoundError if there is none of that name."""
        steps = self._jobs.kept_steps(job)
        if name not in steps:
            raise NotFoundError(f"job {job!r} keeps no step under the name {name!r}")
        return steps[name]

    def known(self, job: Job, step: int, name: str) -> Job | None:
        """Return the job's kept step with this name, if it is the step `step`; None if no kept step has the name.

        Raises:
            AlreadyExistsError: the name belongs to another step of the job.
            BudgetExceededError: the job has as many kept steps as a job can have.
        """
        steps = self._jobs.kept_steps(job.spec.name)
        known = steps.get(name)
        if known is None:
            if len(steps) >= MOST_KEPT:
                raise BudgetExceededError(
                    f"job {job.spec.name!r} has {MOST_KEPT} kept steps, and no job can have more: forget some "
                    "(`paramserver-admin forget`)"
                )
            return None
        # After a roll-back a job may have committed another step with the same number. The kept step is the same one
        # only if the times of the two commits are equal.
        same = (
            step not in job.retained or job.retained[step].committed_at == known.retained[known.first_step].committed_at
        )
        if (known.newest, known.spec.layout) != (step, job.spec.layout) or not same:
            raise AlreadyExistsError(
                f"job {job.spec.name!r} keeps step {known.newest} under the name {name!r}: choose another name for "
                f"step {step}, or forget that one"
            )
        return known

    async def keep(self, job: Job, step: int | None, name: str, *, note: str = "", limits: Sequence[Limit] = ()) -> Job:
        """Keep a committed step under a name until `forget`, also through later steps, roll-backs and new layouts.

        The step is durable when this returns, also if no commit of the job is. Bytes that are only in host memory are
        written to NVMe first; bytes on NVMe are not copied. A repeated call has no effect.

        Args:
            step: the number of the step, or None for the newest settled one.
            note: a text about the step, which operators see.
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
        return await self._backing.watch.unless_stuck(self._hold_and_keep(job, step, name, note, limits))

    async def _hold_and_keep(self, job: Job, step: int | None, name: str, note: str, limits: Sequence[Limit]) -> Job:
        wanted = self._readers.default_step(job) if step is None else step
        if (known := self.known(job, wanted, name)) is not None:
            return known
        try:
            reader = await self._readers.hold(job, wanted)
            try:
                self._registry.admission.check_kept(reader, limits)
            except BaseException:
                reader.close()
                raise
        except BudgetExceededError as error:
            raise BudgetExceededError(
                f"step {wanted} of job {job.spec.name!r} cannot be kept: {error}; or forget kept steps "
                "(`paramserver-admin forget`)"
            ) from error
        # Once the keeping of the step has begun, a cancellation of the caller does not stop it, because its transaction
        # in the catalog must come to a known end.
        return await self._finished(self._keep(reader, name, note))

    async def _keep(self, reader: StepReader, name: str, note: str) -> Job:
        """Make the step that a reader holds a kept step, and return it. The reader is closed in any case."""
        try:
            await self._make_durable(reader)
            kept = await self._new_job(reader, name, note)
            async with self._changing:
                await self._resolve_doubt()
                self._registry.check_not_deleting(kept.spec.name)
                if not self._jobs.has(reader.job):
                    raise ConflictError(f"job {kept.spec.name!r} was deleted while its step was being kept")
                known = self.known(reader.job, reader.step, name)
                if known is not None:
                    return known
                await self._in_catalog_thread(lambda: self._record(kept))
                # From here on the kept step holds the regions, so the reader that held them must not free them when it
                # is closed.
                reader.regions = {}
                self._jobs.add_kept(kept)
        finally:
            await self._close(reader)
        log.info("step %d of job %s is kept as %s", reader.step, kept.spec.name, name)
        return kept

    async def _make_durable(self, reader: StepReader) -> None:
        """Write bytes of a reader's step that are doubtful or not on the durable tier to that tier, and sync it."""
        is_synced = False
        # A sync for another job may fail at the same time and mark bytes of this step as doubtful, while the sync for
        # this step succeeds. So the regions of the step are looked at after each sync, and doubtful ones are written
        # again.
        while not is_synced:
            for slab, region in list(reader.regions.items()):
                if region is not None and (region.doubtful or not region.tier.is_durable):
                    await self._renewal.renew(reader.job, slab, region)
            await self._renewal.sync()
            is_synced = not any(region is not None and region.doubtful for region in reader.regions.values())

    async def _new_job(self, reader: StepReader, name: str, note: str) -> Job:
        """Return the job that represents the kept step. It refers to the reader's regions, but does not hold them."""
        spec = replace(reader.job.spec.without_ranks(), kept=name, note=note)
        kept = Job(spec, created_at=time.time(), first_step=reader.step)
        kept.retained, kept.durable, kept.settled = {reader.step: reader.record}, {reader.step}, reader.step
        regions = {slab.key: (reader.versions[slab], region) for slab, region in reader.regions.items()}
        async for group in in_slices(list(reader.job.groups.values())):
            for slab in self._registry.new_group(kept, group.spec).slabs:
                version, region = regions[slab.key]
                if version is not None and region is not None:
                    slab.add_version(version, region)
                    slab.latest = version
        await kept.index.add(list(kept.groups.values()))
        return kept

    def _record(self, kept: Job) -> None:
        """Enter a kept step and its versions into the catalog. This runs in the catalog's thread."""
        stored_as = self._backing.durable.stored
        written: dict[SlabKey, tuple[int, StoredVersion]] = {
            slab.key: (version, StoredVersion(*stored_as(region)))
            for slab in kept.slabs()
            for version, region in slab.versions.items()
        }
        (record,) = kept.retained.values()
        with self._catalog.transaction():
            self._catalog.create_job(kept.spec, [group.spec for group in kept.groups.values()], kept.created_at)
            self._catalog.add_commit(kept.spec.stored_as, record, written)
            self._catalog.set_settled(kept.spec.stored_as, record.step)

    async def _close(self, reader: StepReader) -> None:
        """Free the regions that a reader holds, once no transaction whose COMMIT failed can still keep its step."""
        self._in_doubt.append(reader)
        try:
            await self._resolve_doubt()
        except StorageError as error:
            log.warning("the space of a step that was not kept is not free yet: %s", error)

    async def _resolve_doubt(self) -> None:
        while self._catalog.in_doubt:
            await self._committer.resolve_doubt()
        readers, self._in_doubt = self._in_doubt, []
        for reader in readers:
            reader.close()

    async def forget(self, job: str, name: str) -> None:
        """Forget a kept step of a job, and free the bytes that neither the job nor another kept step needs.

        If the caller is cancelled, the step is forgotten nevertheless.

        Raises:
            NotFoundError: the job keeps no step under that name.
            DeviceStuckError: a device does not answer; the step is forgotten as soon as it does.
        """
        await self._backing.watch.unless_stuck(self._finished(self._forget(job, name)))

    async def _forget(self, job: str, name: str) -> None:
        async with self._changing:
            kept = self.find(job, name)
            await self._delete([kept.spec.stored_as], [kept])
        log.info("step %d of job %s is not kept as %s any more", kept.first_step, job, name)

    async def delete_job(self, job: str, stored: Iterable[str]) -> None:
        """Delete a job and all its kept steps from the catalog. `stored` has the catalog's names of the job's layouts.

        The kept steps are freed here; the caller frees the layouts.
        """
        async with self._changing:
            kept = list(self._jobs.kept_steps(job).values())
            await self._delete([*stored, *(step.spec.stored_as for step in kept)], kept)

    async def _delete(self, stored: list[str], kept: Iterable[Job]) -> None:
        if stored:
            await self._in_catalog_thread(lambda: self._catalog.delete_jobs(stored))
        for step in kept:
            self._jobs.remove_kept(step)
        for step in kept:
            await self._registry.free_slabs(list(step.slabs()))

    async def sizes(self, job: str) -> dict[str, KeptSize]:
        """Return the size of each kept step of a job, by its name. This visits all slabs of the job."""
        steps = self._jobs.kept_steps(job)
        layouts = self._jobs.layouts(job) if job in self._jobs.by_name else []
        holders: Counter[Region] = Counter()
        async for slab in in_slices([slab for one in (*layouts, *steps.values()) for slab in one.slabs()]):
            holders.update(slab.versions.values())
        return {name: _size(kept, holders) for name, kept in steps.items()}

    async def close(self) -> None:
        """Wait until all calls of `keep` and `forget` have ended. The engine calls this when it closes."""
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _finished(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Wait for `work`, which keeps or forgets a step; return its result. If the caller is cancelled, it goes on."""
        task = unlogged(asyncio.ensure_future(work))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)


def _size(kept: Job, holders: Mapping[Region, int]) -> KeptSize:
    regions = [region for slab in kept.slabs() for region in slab.versions.values()]
    alone = sum(region.nbytes for region in regions if holders[region] <= 1)
    return KeptSize(nbytes=sum(region.nbytes for region in regions), alone_bytes=alone)
