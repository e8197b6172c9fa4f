"""The sync of the durable tier, and the renewal of versions whose bytes a failed sync has put in doubt.

A device that fails a sync may have lost any bytes that were written since the sync before. The device reports the loss
only to the sync that failed, and a later sync succeeds without the lost bytes. So all versions that were not synced
before the failure are in doubt, also those that other jobs wrote (see `Region.doubtful`). This module writes a doubtful
version to another place, from its copy in memory if there is one. It must not read the bytes back from the device while
memory has them, because they may be lost there.

If no memory has a copy of a doubtful version, the version is read back and verified. If the device has lost it, it
stays lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping

from storage.base.errors import DamagedBlockError, DataLossError, StorageError
from storage.base.slices import in_slices
from storage.memory.host_cache import HostCache
from storage.state.slab import HostCopy, Slab
from storage.state.versions import Job
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import Region
from storage.tiers.host import HostTier

log = logging.getLogger(__name__)

Regions = MutableMapping[Slab, Region | None]


class Renewal:
    """Syncs the durable tier for all commits and kept steps, and writes doubtful versions to new regions.

    A version is doubtful if a sync failed after its bytes were written.
    """

    def __init__(
        self,
        host: HostTier,
        backing: BackingTiers,
        host_cache: HostCache,
        jobs: Iterable[Job],
        held_by_readers: Callable[[], Iterable[Regions]],
    ) -> None:
        """Make the renewal of one engine.

        Args:
            jobs: all jobs in all their layouts; each iteration yields the jobs that exist at that time.
            held_by_readers: returns the regions that each open reader holds. A renewal replaces regions there, too.
        """
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._jobs = jobs
        self._held_by_readers = held_by_readers

    async def sync(self) -> None:
        """Sync the durable tier. If that fails, renew the versions that have host copies, and raise the failure.

        All jobs are renewed at once and not at their next commits, because a copy may be evicted before.

        Raises:
            DeviceError, DiskFullError: see `DurableTier.sync`.
        """
        try:
            await self._backing.durable.sync()
        except StorageError:
            await self._renew_copied()
            raise

    async def renew(self, job: Job, slab: Slab, region: Region) -> None:
        """Copy a version to a new region of the durable tier, which takes its place in the slab and in all readers.

        The caller uses this for a doubtful region, and for a region on a tier that is not durable. The bytes come from
        host memory, if the version has a copy there, and otherwise from the region. A region that another renewal has
        replaced meanwhile is left as it is: a failed sync renews the versions of all jobs, and each job's own commit
        renews the ones that it needs.

        Raises:
            DataLossError: the device has lost the bytes, and there is no copy of them; or they are damaged.
            DeviceError, BudgetExceededError: the bytes cannot be read, or cannot be written to another place.
        """
        if not region.holders:
            return
        # While the region is held, its extents get no other bytes, also if another renewal replaces it.
        self._backing.hold(region)
        try:
            self._replace(slab, region, await self._copied(job, slab, region))
        finally:
            self._backing.free(region)

    async def _copied(self, job: Job, slab: Slab, region: Region) -> Region:
        """Return a new region of the durable tier with the bytes of a version, which the caller holds."""
        copy = slab.copy_of(region)
        if copy is None:
            return await self._read_back(job, region)
        # The bytes of the host copy do not change while the copy is pinned: an update or a put waits for the pin, or
        # writes to other memory.
        self._host_cache.pin(copy)
        try:
            return await self._backing.copy_to_durable(region, self._host.view(copy.arena_range))
        finally:
            self._host_cache.unpin(slab, copy, copy.next_use)

    async def _read_back(self, job: Job, region: Region) -> Region:
        try:
            return await self._backing.copy_to_durable(region)
        except DamagedBlockError as error:
            if not region.doubtful:
                raise
            remedy = "restore a copy of the job, or begin it anew"
            if job.durable:
                remedy = f"go back to a durable step ({', '.join(map(str, sorted(job.durable)))})"
            raise DataLossError(
                f"{error.version}: the device has lost these bytes ({', '.join(error.fqns) or 'padding only'}), which "
                "were written before a sync that failed, and no memory has a copy of them. This step cannot be made "
                f"durable. Check the device, and {remedy}; a client that puts its tensors can put these once more"
            ) from error

    def _replace(self, slab: Slab, region: Region, new: Region) -> None:
        """Give every holder of `region` the region `new` instead, and release the caller's hold on `new`.

        A slab that has lost the version meanwhile, by a roll-back or the deletion of its job, is left as it is.
        """
        for version in [version for version, one in slab.versions.items() if one is region]:
            self._backing.hold(new)
            slab.add_version(version, new)
            self._backing.free(region)
        for held in self._held_by_readers():
            if held.get(slab) is region:
                self._backing.hold(new)
                held[slab] = new
                self._backing.free(region)
        self._backing.free(new)

    async def _renew_copied(self) -> None:
        """Renew the doubtful versions of all jobs that host memory has copies of, and log what cannot be renewed.

        All copies are pinned first, so that none of them is evicted before its turn.
        """
        found: list[tuple[Job, Slab, Region, HostCopy]] = []
        try:
            slabs = [(job, slab) for job in self._jobs for slab in job.slabs()]
            async for job, slab in in_slices(slabs):
                region = slab.versions.get(slab.latest) if slab.latest is not None else None
                if region is not None and region.doubtful and (copy := slab.copy_of(region)) is not None:
                    self._host_cache.pin(copy)
                    found.append((job, slab, region, copy))
            for job, slab, region, _ in found:
                if region.doubtful and slab.copy_of(region) is not None:
                    await self.renew(job, slab, region)
        except StorageError as error:
            # A failure to write a doubtful version again does not end the sync, because the commit that needs the
            # version tries once more.
            log.warning("versions that a failed sync has put in doubt could not be written again yet: %s", error)
        finally:
            for _, slab, _, copy in found:
                self._host_cache.unpin(slab, copy, copy.next_use)
