"""Making steps committed and durable, and going back to them.

The order is what keeps the promise: data is synced before the catalog names it, and extents become free only after the
catalog no longer names them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping

from storage.catalog.catalog import Catalog
from storage.catalog.records import CommitRecord, StoredVersion
from storage.copy_writes import CopyClaim, CopyWrites
from storage.errors import DataLossError, NotFoundError
from storage.failpoints import Failpoint, reach
from storage.host_cache import HostCache
from storage.slab import Slab
from storage.slices import in_slices
from storage.tiers.nvme import NvmeRegion, NvmeTier
from storage.tracing import Activity
from storage.versions import Job, unneeded_versions
from storage.waiting import unlogged

log = logging.getLogger(__name__)

# Slabs whose versions are looked at between two looks at the clock.
_FREED_AT_ONCE = 256

InCatalogThread = Callable[[Callable[[], None]], Awaitable[None]]


class Committer:
    """Moves jobs from one committed step to another."""

    def __init__(
        self,
        nvme: NvmeTier,
        host_cache: HostCache,
        copies: CopyWrites,
        catalog: Catalog,
        in_catalog_thread: InCatalogThread,
    ) -> None:
        self._nvme = nvme
        self._host_cache = host_cache
        self._copies = copies
        self._catalog = catalog
        self._in_catalog_thread = in_catalog_thread

    async def commit(self, job: Job, record: CommitRecord, settled: int) -> bool:
        """Commits a step whose updates are done; returns whether it is durable when this returns.

        With durability `step` it is. With `snapshot:N` every N-th step becomes durable in the background; the last
        snapshot must be over (see `finish_snapshot`).
        """
        job.settled = max(job.settled, settled)
        if job.spec.durability.every_steps == 1:
            await self._make_durable(job, record)
        elif job.begins_layout and job.spec.durability.every_steps:
            # What it replaces is freed when all ranks have this step.
            await self._finish(job, self._begin_snapshot(job, record))
        else:
            if job.spec.durability.covers(record.step):
                self._begin_snapshot(job, record)
            job.retained[record.step] = record
        await self._prune(job)
        return record.step in job.durable

    def check_retained(self, job: Job, step: int) -> None:
        """Raises NotFoundError for a step that cannot be gone back to."""
        if step not in job.retained:
            held = ", ".join(map(str, sorted(job.retained))) or "none"
            raise NotFoundError(f"job {job.spec.name!r} does not hold step {step}; it holds: {held}")

    async def roll_back(self, job: Job, step: int) -> None:
        """See Engine.roll_back; nothing is pending here."""
        # First: a snapshot that becomes durable lets go of older steps.
        if job.snapshot is not None:
            await asyncio.wait([job.snapshot])
        await self.settle()
        self.check_retained(job, step)
        for slab in job.tally.unsettled if step not in job.durable else ():
            if _is_lost(slab, step):
                durable = ", ".join(map(str, sorted(job.durable))) or "none"
                raise DataLossError(
                    f"job {job.spec.name!r} cannot go back to step {step}: the bytes of {slab.key} were kept in host "
                    f"memory only and have been overwritten; durable steps: {durable}"
                )
        newer = {s for s in job.retained if s > step}
        if not newer:
            return
        if newer & job.durable:
            kept = sorted(job.durable - newer)
            await self._in_catalog_thread(lambda: self._forget(job.spec.identity, kept))
            job.durable -= newer
            # A version that a retained step still sees may be known to no durable one any more. Of settled slabs all
            # steps see the same one, so that it stays recorded as long as any step is.
            if not kept:
                job.tally.changed.update(dict.fromkeys(job.slabs()))
            for slab in job.tally.changed:
                slab.recorded &= {slab.version_at(s) for s in kept}
        for s in newer:
            del job.retained[s]
        job.settled = min(job.settled, step)
        self._restore(job, step)

    async def hold(self, job: Job, step: int, held: MutableMapping[Slab, NvmeRegion | None]) -> None:
        """Hold the regions that a reader of a committed step sees, and enter each into `held`; None: never written.

        What is on NVMe is held, and what is in host memory only is claimed, before this waits for anything: whatever is
        trained, committed or pruned from then on, the step stays whole. Then the claimed copies are written to NVMe;
        the update of a slab waits until its copy was. Where this fails, the caller frees what was entered.

        Raises:
            NotFoundError: the step is not retained.
            DataLossError: some of its bytes were kept in host memory only, and are gone.
        """
        self.check_retained(job, step)
        versions = {slab: _version_seen(job, slab, step) for slab in job.slabs()}
        claims: list[CopyClaim] = []
        for slab, version in versions.items():
            if version is None:
                held[slab] = None
            elif version in slab.versions:
                held[slab] = self._held(slab.versions[version])
            else:
                claims.append(CopyClaim(slab, version))
        try:
            for claim in claims:
                held[claim.slab] = self._held(await self._copies.write(claim))
                claim.release()
        finally:
            for claim in claims:
                claim.release()

    def _held(self, region: NvmeRegion) -> NvmeRegion:
        self._nvme.hold(region)
        return region

    async def settle(self) -> None:
        """To be awaited before anything of a step whose commit was refused is given up; see Catalog.settle."""
        if self._catalog.in_doubt:
            await self._in_catalog_thread(self._catalog.settle)

    def discard_pending(self, job: Job) -> None:
        """Forgets what an abandoned step wrote; the catalog must be settled.

        Where it overwrote the only bytes of the last committed step, the job goes back to its last durable one, if any.
        """
        newest = job.newest
        if newest is not None and job.durable and any(_is_lost(slab, newest) for slab in job.tally.unsettled):
            job.retained = {step: record for step, record in job.retained.items() if step in job.durable}
            log.warning(
                "job %s goes back from step %d to step %d: an unfinished step has overwritten bytes that were kept in "
                "host memory only",
                *(job.spec.name, newest, job.newest),
            )
        self._restore(job, job.newest)

    def discard(self, job: Job, slabs: Iterable[Slab]) -> None:
        """Makes some slabs what the last committed step left, whatever the pending one wrote."""
        for slab in slabs:
            if slab.latest is not None and job.newest is not None and slab.latest > job.newest:
                if (region := slab.pop_version(slab.latest)) is not None:
                    self._nvme.free(region)
                self._restore_slab(job, slab, job.newest)

    def _restore(self, job: Job, step: int | None) -> None:
        """Makes the versions that `step` sees the newest ones; None: there are none."""
        for slab in job.tally.unsettled:
            if slab.latest is not None and (step is None or slab.latest > step):
                self._restore_slab(job, slab, step)
        # At once: the next step may give a slab another version of the same number.
        for _ in self._freeing(job):
            pass

    def _restore_slab(self, job: Job, slab: Slab, step: int | None) -> None:
        if step is None:
            slab.latest = None
        elif slab.backed or step in job.durable:
            slab.latest = slab.version_at(step)
        else:
            # Gone: whoever asks for them is told so.
            slab.latest = step
        if slab.copy is not None and slab.copy.at_home:
            slab.copy.step = None
        else:
            self._host_cache.detach(slab)

    async def _make_durable(self, job: Job, record: CommitRecord) -> None:
        for slab, (version, region) in (await _unrecorded(job, record.step)).items():
            if region.doubtful:
                slab.add_version(version, await self._nvme.write_again(region))
                self._nvme.free(region)
        written = await _unrecorded(job, record.step)
        kept = _durable_after(job, record.step)
        with self._nvme.tracer.span(Activity.SYNC, f"{job.spec.identity}/all groups/step {record.step}"):
            await self._nvme.sync()
        await self._in_catalog_thread(lambda: self._record(job, record, written, sorted(kept)))
        for slab, (version, _) in written.items():
            slab.recorded.add(version)
        job.durable = kept
        job.retained[record.step] = record
        job.retained = dict(sorted(job.retained.items()))

    async def finish_snapshot(self, job: Job, step: int) -> None:
        """Waits for the last snapshot where the commit of `step` will begin another. Raises its failure, once: the next
        one may find room again."""
        if job.snapshot is not None and job.spec.durability.covers(step):
            await self._finish(job, job.snapshot)

    async def _finish(self, job: Job, snapshot: asyncio.Task[None]) -> None:
        await asyncio.wait([snapshot])
        job.snapshot = None
        snapshot.result()

    def _begin_snapshot(self, job: Job, record: CommitRecord) -> asyncio.Task[None]:
        # Before anything else runs: an update that begins later must find the claim, and wait for the slab's write.
        claims = [CopyClaim(slab, slab.latest) for slab in job.tally.unsaved if slab.latest is not None]
        job.snapshot_step = record.step
        # The next commit that waits for the snapshot raises its failure.
        job.snapshot = unlogged(asyncio.ensure_future(self._snapshot(job, record, claims)))
        return job.snapshot

    async def _snapshot(self, job: Job, record: CommitRecord, claims: list[CopyClaim]) -> None:
        """Writes what is in host memory only, then records the step."""
        try:
            for claim in claims:
                await self._copies.write(claim)
                claim.release()
            await self._make_durable(job, record)
            log.info("snapshot of job %s, step %d, is durable", job.spec.name, record.step)
        except Exception:
            log.exception("snapshot of job %s, step %d, failed", job.spec.name, record.step)
            raise
        finally:
            for claim in claims:
                claim.release()
            job.snapshot_step = None
            await self._prune(job)

    def _record(
        self,
        job: Job,
        record: CommitRecord,
        written: Mapping[Slab, tuple[int, NvmeRegion]],
        kept: list[int],
    ) -> None:
        stored = {slab.key: (v, StoredVersion(r.extents, r.checksums.dump())) for slab, (v, r) in written.items()}
        with self._catalog.transaction():
            if not job.durable:
                self._catalog.create_job(job.spec, [group.spec for group in job.groups.values()], job.created_at)
            self._catalog.add_commit(job.spec.identity, record, stored)
            self._catalog.retain(job.spec.identity, kept)

    def _forget(self, job: str, kept: list[int]) -> None:
        with self._catalog.transaction():
            self._catalog.retain(job, kept)

    async def _prune(self, job: Job) -> None:
        """Drops the steps that nobody can want any more. Durable ones were chosen when the catalog was written."""
        newest = job.newest
        for step in list(job.retained):
            if step < job.settled and step != newest and step not in job.durable:
                del job.retained[step]
        async for _ in in_slices(self._freeing(job)):
            pass

    def _freeing(self, job: Job) -> Iterator[None]:
        """Free the versions that no step needs any more; yields after each small part of that work."""
        changed = list(job.tally.changed)
        for start in range(0, len(changed), _FREED_AT_ONCE):
            if self._catalog.in_doubt:
                # A crash may yet make a step valid that needs them. The next commit frees them.
                return
            # Anew for each part: a step may have been committed between two of them.
            snapshot = set() if job.snapshot_step is None else {job.snapshot_step}
            # Of a slab in host memory only, a version on NVMe is what durable steps see, and no other.
            backed, alone = snapshot | job.retained.keys(), snapshot | job.durable
            oldest, recorded = min(backed | job.durable, default=None), job.spec.durability.every_steps > 0
            for slab in changed[start : start + _FREED_AT_ONCE]:
                for version in unneeded_versions(slab, backed if slab.backed else alone):
                    if (region := slab.pop_version(version)) is not None:
                        self._nvme.free(region)
                    reach(Failpoint.DURING_RECLAIM)
                job.tally.settle(slab, oldest, recorded=recorded)
            yield


def _version_seen(job: Job, slab: Slab, step: int) -> int | None:
    """The version that a reader of a committed step sees. Raises DataLossError where it is gone."""
    if slab.backed or step in job.durable:
        return slab.version_at(step)
    if _is_lost(slab, step):
        raise DataLossError(
            f"step {step} of job {job.spec.name!r} cannot be read whole: the bytes of {slab.key} were kept in host "
            "memory only and have been overwritten; read the newest step"
        )
    return slab.latest


def _is_lost(slab: Slab, step: int) -> bool:
    """Whether the slab's bytes of `step`, a step that is not durable, were in host memory only and are gone."""
    if slab.backed or slab.latest is None:
        return False
    return slab.latest > step or (slab.current_copy is None and slab.latest not in slab.versions)


async def _unrecorded(job: Job, step: int) -> dict[Slab, tuple[int, NvmeRegion]]:
    """What `step` sees and the catalog does not know yet.

    What the step sees stays the same between two slices: the step is sealed, and kept. A slab that is not among the
    changed ones at the beginning is settled, so that what the step sees of it is recorded.
    """
    found: dict[Slab, tuple[int, NvmeRegion]] = {}
    async for slab in in_slices(list(job.tally.changed)):
        version = slab.version_at(step)
        if version is not None and version not in slab.recorded:
            found[slab] = (version, slab.versions[version])
    return found


def _durable_after(job: Job, step: int) -> set[int]:
    """The durable steps to keep with `step` added: from the newest one on that all ranks are known to have."""
    steps = {*job.durable, step}
    base = max((s for s in steps if s <= job.settled), default=None)
    return {s for s in steps if base is None or s >= base}
