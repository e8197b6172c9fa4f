"""This module writes host copies to NVMe for snapshots and readers, which need bytes that are in host memory only.

This module owns the claims: while a slab is claimed, its newest bytes do not change, because its updates and puts wait.
The slab is written once for all its claims. This module must never leave a claim behind, because the slab could not be
updated any more.
"""

from __future__ import annotations

from storage.base.errors import DataLossError
from storage.memory.host_cache import HostCache
from storage.state.slab import CopyWrite, Slab
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import Region
from storage.tiers.host import HostTier


class CopyClaim:
    """One snapshot's or reader's claim on the newest bytes of a slab.

    The claimant always releases the claim, also after an error.
    """

    def __init__(self, slab: Slab, version: int) -> None:
        """Claim the newest bytes of the slab, which the step `version` wrote. They do not change until `release`."""
        if slab.copy_write is None:
            slab.copy_write = CopyWrite()
        self.slab = slab
        self.version = version
        self.copy_write = slab.copy_write
        self._released = False
        self.copy_write.claims += 1

    def release(self) -> None:
        """Let the slab's updates go on, unless there are other claims. A repeated call has no effect."""
        if self._released:
            return
        self._released = True
        self.copy_write.claims -= 1
        if self.copy_write.claims == 0:
            self.slab.copy_write = None
            self.copy_write.over.set()


class CopyWrites:
    """Writes the host copies of claimed slabs to the durable tier, once for all claims on a slab."""

    def __init__(self, host: HostTier, backing: BackingTiers, host_cache: HostCache) -> None:
        self._host = host
        self._durable = backing.durable
        self._host_cache = host_cache

    async def write(self, claim: CopyClaim) -> Region:
        """Write a claimed slab's copy to NVMe, unless another claimant has done so already.

        If an earlier claimant's write has failed, this claimant writes the copy itself, because the reason may concern
        the earlier claimant alone: its reader was cancelled, for example.

        Returns:
            The region that holds the version on NVMe. The claimant calls `BackingTiers.hold` before it releases its
            claim, because the next commit may free the version.

        Raises:
            DataLossError: a roll-back or the job's deletion discarded the bytes meanwhile.
            BudgetExceededError: nvme_budget or the disk has no room for them.
            DeviceError: they cannot be written.
        """
        async with claim.copy_write.writing:
            if claim.version not in claim.slab.versions:
                await self._write(claim.slab, claim.version)
            return claim.slab.source(claim.version)

    async def _write(self, slab: Slab, version: int) -> None:
        copy = slab.current_copy
        if copy is None or not _has(slab, version):
            raise _discarded(slab, version)
        self._host_cache.pin(copy)
        try:
            new = self._durable.new_version(slab.nbytes, slab.label(version), slab.layout.block_bytes)
            async with new as region:
                with slab.filling(region):
                    await self._durable.write_from(region, 0, self._host.view(copy.arena_range))
                if not _has(slab, version):
                    raise _discarded(slab, version)
                slab.add_version(version, region)
        finally:
            self._host_cache.unpin(slab, copy, copy.next_use)


def _has(slab: Slab, version: int) -> bool:
    """Return whether a claimed version can still be written: it is the slab's newest one, and the slab was not deleted.

    A deleted slab must get no region, because no task would free it.
    """
    return slab.latest == version and not slab.deleted


def _discarded(slab: Slab, version: int) -> DataLossError:
    return DataLossError(
        f"{slab.key}: a roll-back or the deletion of the job discarded the bytes of step {version} before they were "
        "written to NVMe; read the newest step"
    )
