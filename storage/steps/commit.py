"""The commit of a step, its durability, and the return to an earlier committed step.

This module must sync the data before the catalog names it, and must free extents only after the catalog no longer names
them: otherwise a crash in between leaves a catalog that names wrong bytes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from dataclasses import replace

from storage.base.errors import ConflictError, DataLossError, NotFoundError, StorageError
from storage.base.failpoints import Failpoint, reach
from storage.base.slices import in_slices
from storage.base.tracing import Activity, Tracer
from storage.base.waiting import unlogged
from storage.catalog.catalog import Catalog
from storage.catalog.records import CommitRecord, RolledBack, StoredVersion
from storage.memory.copy_writes import CopyClaim, CopyWrites
from storage.memory.host_cache import HostCache
from storage.state.slab import Slab
from storage.state.versions import Job, unneeded_versions
from storage.steps.renewal import Renewal
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import Region

log = logging.getLogger(__name__)

# Versions are freed in batches of this many slabs. Between two batches, `_freeing` checks the clock and reads the state
# of the job anew.
_FREED_AT_ONCE = 256
# The number of random bytes in the name of a roll-back, so that no two roll-backs of a job have the same name.
_MARK_BYTES = 8

InCatalogThread = Callable[[Callable[[], None]], Awaitable[None]]


class Committer:
    """Commits the steps of all jobs, makes them durable, and returns jobs to earlier steps.

    `PendingSteps` calls it when all updates and puts of a step are done, and readers hold steps through it.
    """

    def __init__(
        self,
        backing: BackingTiers,
        host_cache: HostCache,
        copies: CopyWrites,
        renewal: Renewal,
        tracer: Tracer,
        catalog: Catalog,
        in_catalog_thread: InCatalogThread,
    ) -> None:
        self._backing = backing
        self._host_cache = host_cache
        self._copies = copies
        self._renewal = renewal
        self._tracer = tracer
        self._catalog = catalog
        self._in_catalog_thread = in_catalog_thread

    async def commit(self, job: Job, record: CommitRecord, settled: int | None) -> bool:
        """Commit a step whose updates are done; return whether it is durable when this returns.

        With durability `step` every step is durable. With `snapshot:N` every N-th step becomes durable in the
        background. The last snapshot must be over before this is called (see `finish_snapshot`).
        """
        job.note_settled(settled)
        if job.spec.durability.every_steps == 1:
            await self._make_durable(job, record)
        elif job.begins_layout and job.spec.durability.every_steps:
            # Wait for the snapshot, because the old layout is freed when all ranks have this step, so this step must be
            # durable.
            await self._finish(job, self._begin_snapshot(job, record))
        else:
            if job.spec.durability.covers(record.step):
                self._begin_snapshot(job, record)
            job.retained[record.step] = record
        await self._prune(job)
        return record.step in job.durable

    async def amend(self, job: Job, step: int, rank: int, state: bytes) -> None:
        """Replace the client state that a rank has stored with a committed step; see `Engine.amend`."""
        # A snapshot of the step that is being written records the client states that the step had when the snapshot
        # began. So it must end before the catalog gets the new state, which the snapshot would overwrite.
        if job.snapshot is not None and job.snapshot_step == step:
            await asyncio.wait([job.snapshot])
        self.check_retained(job, step)
        if step in job.durable:
            await self._in_catalog_thread(lambda: self._replace_state(job, step, rank, state))
        # The step's record is read again after the wait, because meanwhile another rank may have replaced its state, or
        # the step may no longer be retained.
        if (record := job.retained.get(step)) is not None:
            job.retained[step] = replace(record, client_states={**record.client_states, rank: state})

    def _replace_state(self, job: Job, step: int, rank: int, state: bytes) -> None:
        """Replace a client state in the catalog. This runs in the catalog's thread.

        Raises:
            ConflictError: a newer step, or a deletion of the job, was in the thread's queue before this and has removed
                the step. The event loop, which has checked the step, did not know of it yet.
        """
        if not self._catalog.has_commit(job.spec.identity, step):
            raise ConflictError(
                f"rank {rank} cannot amend step {step} of job {job.spec.name!r}: a newer step was being committed, or "
                "the job was being deleted"
            )
        with self._catalog.transaction():
            self._catalog.replace_state(job.spec.identity, step, rank, state)

    def has_whole(self, job: Job, step: int) -> bool:
        """Return whether a retained step can be read and returned to.

        A step cannot be read if its bytes were only in host memory, and a later step has overwritten them.
        """
        return step in job.durable or not any(_is_lost(slab, step) for slab in job.tally.dirty)

    def check_retained(self, job: Job, step: int) -> None:
        """Raise NotFoundError for a step that is not retained, so that the job cannot return to it."""
        if step not in job.retained:
            held = ", ".join(map(str, sorted(job.retained))) or "none"
            raise NotFoundError(f"job {job.spec.name!r} does not hold step {step}; it holds: {held}")

    async def roll_back(self, job: Job, step: int, *, is_ordered: bool) -> None:
        """Make a committed step the newest one again (see `Engine.roll_back`). No step may be pending."""
        # Wait for a snapshot that is being written before the retained steps are read, because older steps are no
        # longer retained when it becomes durable.
        if job.snapshot is not None:
            await asyncio.wait([job.snapshot])
        await self.resolve_doubt()
        self.check_retained(job, step)
        for slab in job.tally.dirty if step not in job.durable else ():
            if _is_lost(slab, step):
                durable = ", ".join(map(str, sorted(job.durable))) or "none"
                raise DataLossError(
                    f"job {job.spec.name!r} cannot go back to step {step}: the bytes of {slab.key} were kept in host "
                    f"memory only and have been overwritten; durable steps: {durable}"
                )
        newer = {s for s in job.retained if s > step}
        mark = RolledBack(step, secrets.token_hex(_MARK_BYTES)) if is_ordered else None
        kept = sorted(job.durable - newer) if newer & job.durable else None
        # The catalog gets the mark of the roll-back now only if a durable step of the job is left. If none is left,
        # `_record` enters the mark with the next durable step, because a mark without a job would remain for a later
        # job of the same name.
        stored = mark if job.durable - newer else None
        job.go_back_to(step)
        if kept is not None or stored is not None:
            settled = None if kept is None else job.durable_everywhere(kept)
            await self._in_catalog_thread(lambda: self._keep_in_catalog(job.spec.identity, kept, settled, stored))
        if mark is not None:
            job.rolled_back = (*(one for one in job.rolled_back if one.step < step), mark)
        if kept is not None:
            job.durable -= newer
            # The catalog has dropped the durable steps that the roll-back undid. It no longer names a version that no
            # other durable step sees, even if a step that is only in memory sees the version. So such versions are
            # taken out of `recorded`. Clean slabs are left alone: all steps see the same version of a clean slab, so
            # this version stays recorded as long as a durable step is left.
            if not kept:
                job.tally.changed.update(dict.fromkeys(job.slabs()))
            for slab in job.tally.changed:
                slab.recorded &= {slab.version_at(s) for s in kept}
        if not newer:
            return
        for s in newer:
            del job.retained[s]
        self._restore(job, step)

    async def record_settled(self, job: Job) -> None:
        """Record the newest settled step of a job in the catalog.

        A commit records only that the step before it is settled. So this is called at the end of a run, when no further
        commit records that the last step is settled.
        """
        settled = job.durable_everywhere(job.durable)
        await self._in_catalog_thread(lambda: self._catalog.record_settled(job.spec.identity, settled))

    def newest_settled(self, job: Job) -> int | None:
        """Return the newest settled step of which this store has all bytes; None if none is known.

        If bytes of a settled step are only in host memory, they are overwritten when the next step is sealed here,
        although other nodes may not have committed that next step yet.
        """
        settled = (step for step in job.retained if job.settled is not None and step <= job.settled)
        return next((step for step in sorted(settled, reverse=True) if self.has_whole(job, step)), None)

    async def hold(self, job: Job, step: int, held: MutableMapping[Slab, Region | None]) -> dict[Slab, int | None]:
        """Hold the regions that a reader of a committed step sees, and enter each region into `held`.

        A slab that was never written is entered with None. Before this waits for anything, it holds the regions on NVMe
        and claims the bytes that are only in host memory. So the step stays complete even if later steps are trained,
        committed or pruned meanwhile. Then the claimed copies are written to NVMe; the update of a slab waits until its
        copy is written. If this raises, the caller frees the regions that were entered.

        Returns:
            The version of each slab that the step sees, which is None for a slab that was never written.

        Raises:
            NotFoundError: the step is not retained.
            DataLossError: some of the step's bytes were kept in host memory only, and are overwritten.
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
        return versions

    def _held(self, region: Region) -> Region:
        """Hold a region, so that its bytes stay until the caller frees it, and return the region."""
        self._backing.hold(region)
        return region

    @property
    def in_doubt(self) -> bool:
        """Whether a commit that failed may become valid after a crash; see `Catalog.in_doubt`."""
        return self._catalog.in_doubt

    async def resolve_doubt(self) -> None:
        """Make sure that a commit that failed cannot become valid after a crash (see `Catalog.resolve_doubt`).

        The caller awaits this before it frees any bytes of the step whose commit failed.
        """
        while self._catalog.in_doubt:
            await self._in_catalog_thread(self._catalog.resolve_doubt)

    async def finish_snapshot_to_return_to(self, job: Job) -> None:
        """Wait for the snapshot under way if `abandon_pending` will make the job return to a durable step.

        The job will return if the pending step has overwritten bytes of the last committed step. If it returned while
        the snapshot is under way, the snapshot would record a step whose versions are freed or are those of another
        step.
        """
        if job.snapshot is not None and _has_lost_newest(job):
            await asyncio.wait([job.snapshot])

    def abandon_pending(self, job: Job) -> None:
        """Free the versions that an abandoned step wrote.

        The caller awaits `finish_snapshot_to_return_to` and `resolve_doubt` first. If the step overwrote the only bytes
        of the last committed step, the job returns to its last durable step, if there is one.
        """
        newest = job.newest
        if job.durable and _has_lost_newest(job):
            job.retained = {step: record for step, record in job.retained.items() if step in job.durable}
            job.go_back_to(max(job.durable))
            if job.newest != newest:
                log.warning(
                    "job %s goes back from step %d to step %d: an unfinished step has overwritten bytes that were kept "
                    "in host memory only",
                    *(job.spec.name, newest, job.newest),
                )
        self._restore(job, job.newest)

    def withdraw(self, job: Job, slabs: Iterable[Slab]) -> None:
        """Undo the updates of some slabs in the pending step: give the slabs the last committed step's bytes again.

        The caller awaits `resolve_doubt` first.
        """
        for slab in slabs:
            if slab.latest is not None and job.newest is not None and slab.latest > job.newest:
                if (region := slab.pop_version(slab.latest)) is not None:
                    self._backing.free(region)
                self._restore_slab(job, slab, job.newest)

    def _restore(self, job: Job, step: int | None) -> None:
        """Make the versions that `step` sees the newest ones. If `step` is None, the slabs have no bytes afterwards."""
        for slab in job.tally.dirty:
            if slab.latest is not None and (step is None or slab.latest > step):
                self._restore_slab(job, slab, step)
        # The versions of the discarded steps are freed without a pause, because the next step may give a slab another
        # version with the same number. The caller has made sure that no commit of this job is in doubt. A commit of
        # another job that is in doubt needs none of these versions.
        for _ in self._freeing(job, is_certain=True):
            pass

    def _restore_slab(self, job: Job, slab: Slab, step: int | None) -> None:
        """Make the version that `step` sees the slab's newest one, and free a copy of other bytes."""
        if step is None:
            slab.latest = None
        elif slab.backed or step in job.durable:
            slab.latest = slab.version_at(step)
        else:
            # If host memory has lost the bytes of this step, the next read of the slab raises DataLossError.
            slab.latest = step
        if slab.copy is not None and slab.copy.at_home:
            slab.copy.step = None
        else:
            self._host_cache.free_copy(slab)

    async def _make_durable(self, job: Job, record: CommitRecord) -> None:
        """Bring a step's bytes onto the durable tier, sync them, and record the step in the catalog."""
        written = await self._write_and_sync(job, record.step)
        # The kernel reports lost bytes of a file to one sync only. If that was a sync for another job, a later sync for
        # this job succeeds, although bytes of this job may be lost. So the regions that the failed sync marked as
        # doubtful are written again, until there are none.
        while any(region.doubtful for _, region in written.values()):
            written = await self._write_and_sync(job, record.step)
        durable = {*job.durable, record.step}
        settled, kept = job.durable_everywhere(durable), _needed(job, durable)
        await self._in_catalog_thread(lambda: self._record(job, record, written, sorted(kept), settled))
        for slab, (version, _) in written.items():
            slab.recorded.add(version)
        job.durable = kept
        job.retained[record.step] = record
        job.retained = dict(sorted(job.retained.items()))

    async def _write_and_sync(self, job: Job, step: int) -> dict[Slab, tuple[int, Region]]:
        """Bring a step's bytes onto the durable tier, write doubtful bytes there again, and sync them.

        Returns:
            The versions that the step sees and the catalog does not name yet.
        """
        for slab, (_, region) in (await _unrecorded(job, step)).items():
            if region.doubtful or not region.tier.is_durable:
                await self._renewal.renew(job, slab, region)
        written = await _unrecorded(job, step)
        with self._tracer.span(Activity.SYNC, f"{job.spec.identity}/all groups/step {step}"):
            await self._renewal.sync()
        return written

    async def finish_snapshot(self, job: Job, step: int) -> None:
        """Wait for the last snapshot if the commit of `step` will begin another one, and raise its failure.

        The failure is raised only once. So the client can repeat the same commit, which then begins a new snapshot that
        may find room.
        """
        if job.snapshot is not None and job.spec.durability.covers(step):
            await self._finish(job, job.snapshot)

    async def _finish(self, job: Job, snapshot: asyncio.Task[None]) -> None:
        """Wait until a snapshot has ended, and raise its error if it has failed."""
        await asyncio.wait([snapshot])
        job.snapshot = None
        snapshot.result()

    def _begin_snapshot(self, job: Job, record: CommitRecord) -> asyncio.Task[None]:
        # The snapshot's slabs are claimed before any other task runs, because an update that begins later must find the
        # claim and wait until the slab is written.
        claims = [CopyClaim(slab, slab.latest) for slab in job.tally.unsaved if slab.latest is not None]
        job.snapshot_step = record.step
        # The next commit that waits for the snapshot raises the snapshot's failure, so asyncio does not have to log it.
        job.snapshot = unlogged(asyncio.ensure_future(self._snapshot(job, record, claims)))
        return job.snapshot

    async def _snapshot(self, job: Job, record: CommitRecord, claims: list[CopyClaim]) -> None:
        """Write the bytes that are only in host memory to the durable tier, then record the step."""
        try:
            await self._forget_unneeded(job)
            for claim in claims:
                await self._copies.write(claim)
                claim.release()
            await self._make_durable(job, record)
            log.info("snapshot of job %s, step %d, is durable", job.spec.name, record.step)
        except StorageError as error:
            log.error("snapshot of job %s, step %d, failed: %s", job.spec.name, record.step, error)
            raise
        except Exception:
            log.exception("snapshot of job %s, step %d, failed in an unforeseen way", job.spec.name, record.step)
            raise
        finally:
            for claim in claims:
                claim.release()
            job.snapshot_step = None
            await self._prune(job)

    async def _forget_unneeded(self, job: Job) -> None:
        """Delete the durable steps that no node needs to go back to, and free their bytes for the next snapshot."""
        kept = _needed(job, job.durable)
        if kept != job.durable:
            settled = job.durable_everywhere(kept)
            await self._in_catalog_thread(lambda: self._keep_in_catalog(job.spec.identity, sorted(kept), settled, None))
            job.durable = kept
            await self._prune(job)

    def _record(
        self,
        job: Job,
        record: CommitRecord,
        written: Mapping[Slab, tuple[int, Region]],
        kept: list[int],
        settled: int | None,
    ) -> None:
        """Enter a step and its new versions into the catalog, and keep only the steps `kept` there.

        This runs in the catalog's thread.
        """
        stored_as = self._backing.durable.stored
        stored = {slab.key: (v, StoredVersion(*stored_as(region))) for slab, (v, region) in written.items()}
        with self._catalog.transaction():
            if not job.durable:
                self._catalog.create_job(job.spec, [group.spec for group in job.groups.values()], job.created_at)
                for mark in job.rolled_back:
                    self._catalog.add_rolled_back(job.spec.identity, mark)
            self._catalog.add_commit(job.spec.identity, record, stored)
            self._catalog.retain(job.spec.identity, kept)
            self._catalog.set_settled(job.spec.identity, settled)

    def _keep_in_catalog(self, job: str, kept: list[int] | None, settled: int | None, mark: RolledBack | None) -> None:
        """Keep only the steps `kept` of a job in the catalog (None: all), and record an operator's roll-back, if any.

        This runs in the catalog's thread. `settled` is the newest settled one of the steps `kept`.
        """
        with self._catalog.transaction():
            if kept is not None:
                self._catalog.retain(job, kept)
            if kept:
                self._catalog.set_settled(job, settled)
            if mark is not None:
                self._catalog.add_rolled_back(job, mark)

    async def _prune(self, job: Job) -> None:
        """Stop retaining the steps that no rank can return to, and free versions that no step needs any more.

        Durable steps stay retained until the catalog does not have them any more.
        """
        newest = job.newest
        for step in list(job.retained):
            if job.settled is not None and step < job.settled and step != newest and step not in job.durable:
                del job.retained[step]
        async for _ in in_slices(self._freeing(job)):
            pass

    def _freeing(self, job: Job, *, is_certain: bool = False) -> Iterator[None]:
        """Free the versions that no step needs any more; yield after each small part of that work.

        Args:
            job: the job.
            is_certain: whether the caller has made sure that no commit of this job is in doubt. Then nothing is left
                for later, even if a commit of another job is in doubt.
        """
        changed = list(job.tally.changed)
        for start in range(0, len(changed), _FREED_AT_ONCE):
            if self._catalog.in_doubt and not is_certain:
                # A commit whose transaction failed may become valid after a crash, and its step may need the versions
                # that would be freed. So they stay, and the next commit frees them.
                return
            # The steps that need versions are computed anew for each batch of slabs, because a step may have been
            # committed since the batch before.
            snapshot = set() if job.snapshot_step is None else {job.snapshot_step}
            # If a slab's newest bytes are only in host memory between snapshots, only durable steps need its versions
            # on NVMe.
            backed, alone = snapshot | job.retained.keys(), snapshot | job.durable
            oldest, recorded = min(backed | job.durable, default=None), job.spec.durability.every_steps > 0
            for slab in changed[start : start + _FREED_AT_ONCE]:
                for version in unneeded_versions(slab, backed if slab.backed else alone):
                    if (region := slab.pop_version(version)) is not None:
                        self._backing.free(region)
                    reach(Failpoint.DURING_RECLAIM)
                job.tally.remove_if_clean(slab, oldest, recorded=recorded)
            yield


def _version_seen(job: Job, slab: Slab, step: int) -> int | None:
    """Return the version that a reader of a committed step sees; raise DataLossError if its bytes are gone."""
    if slab.backed or step in job.durable:
        return slab.version_at(step)
    if _is_lost(slab, step):
        raise DataLossError(
            f"step {step} of job {job.spec.name!r} cannot be read whole: the bytes of {slab.key} were kept in host "
            "memory only and have been overwritten; read the newest step"
        )
    return slab.latest


def _has_lost_newest(job: Job) -> bool:
    """Return whether the job's newest step has lost bytes, so that it cannot be read or returned to; see `_is_lost`."""
    newest = job.newest
    return newest is not None and any(_is_lost(slab, newest) for slab in job.tally.dirty)


def _is_lost(slab: Slab, step: int) -> bool:
    """Return whether a slab's bytes of a step that is not durable were only in host memory and are gone."""
    if slab.backed or slab.latest is None:
        return False
    return slab.latest > step or (slab.current_copy is None and slab.latest not in slab.versions)


async def _unrecorded(job: Job, step: int) -> dict[Slab, tuple[int, Region]]:
    """Return the versions, with their regions, that `step` sees and the catalog does not name yet.

    The step does not change while this pauses between slices, because it is sealed and retained. A slab that is not
    among the changed ones is clean, so the catalog names the version that the step sees.
    """
    found: dict[Slab, tuple[int, Region]] = {}
    async for slab in in_slices(list(job.tally.changed)):
        version = slab.version_at(step)
        if version is not None and version not in slab.recorded:
            found[slab] = (version, slab.versions[version])
    return found


def _needed(job: Job, durable: Set[int]) -> set[int]:
    """Return the steps in `durable` that a run may have to go back to, so that they must stay in the catalog.

    These are the newest one that all nodes are known to have made durable, and all newer ones.
    """
    base = job.durable_everywhere(durable)
    return {s for s in durable if base is None or s >= base}
