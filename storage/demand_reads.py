"""Which bytes a reader of a slab gets: the newest ones, or those that a step leaves, whatever is being written.

Owns nothing: copies belong to their slabs, or to the reader alone. Must never show a reader a later step than it asked
for.
"""

from __future__ import annotations

import asyncio

from storage.errors import StepAbortedError
from storage.host_cache import HostCache
from storage.prefetch import PrefetchQueue
from storage.slab import HostCopy, Slab
from storage.tiers.backing import BackingTiers
from storage.tiers.host import HostTier
from storage.versions import Job


class DemandReads:
    """Demand fetches of all jobs; what a method raises is said at the engine's."""

    def __init__(self, host: HostTier, backing: BackingTiers, host_cache: HostCache, queue: PrefetchQueue) -> None:
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._queue = queue

    async def fetch(self, job: Job, slab: Slab, position: float, as_of: int | None) -> HostCopy:
        """A pinned copy; see Engine.fetch."""
        write = job.pending.writes.get(slab) if job.pending else None
        if write is None and slab.current_copy is not None:
            return await self._queue.fetch(slab, position)
        return await self._backing.watch.unless_stuck(
            self._fetch(job, slab, position, as_of), give_back=lambda copy: self._host_cache.unpin(slab, copy)
        )

    async def _fetch(self, job: Job, slab: Slab, position: float, as_of: int | None) -> HostCopy:
        pending = job.pending
        write = pending.writes.get(slab) if pending else None
        if write is not None and pending is not None and (as_of is None or as_of >= pending.step):
            await asyncio.wait([write])
            if write.cancelled() or write.exception() is not None:
                raise StepAbortedError(
                    f"the update of group {slab.key.group!r} did not finish; resume from the last committed step"
                )
            write = None
        if write is not None and slab.backed:
            return await self._read(job, slab, as_of)
        # A write of what is in host memory only has not begun: it waits for the seal, and for whoever reads.
        copy = await self._queue.fetch(slab, position)
        if as_of is None or copy.step is None or copy.step <= _bound(job, as_of):
            return copy
        # An update for a later step was handed over while this waited for the device, and came first.
        self._host_cache.unpin(slab, copy)
        return await self._read(job, slab, as_of)

    async def _read(self, job: Job, slab: Slab, as_of: int | None) -> HostCopy:
        """What a committed step left, in a copy that is the reader's alone."""
        copy = HostCopy(await self._host_cache.room_for(slab), step=None, at_home=False)
        self._host_cache.pin(copy)
        try:
            version = slab.version_at(_bound(job, as_of))
            view = self._host.view(copy.region)
            if version is None:
                # Never written before.
                view[:] = bytes(len(view))
            else:
                await self._backing.read_into(slab.source(version), 0, view)
        except BaseException:
            self._host_cache.unpin(slab, copy)
            raise
        copy.step = version
        return copy


def _bound(job: Job, as_of: int | None) -> int:
    """The newest step that may be shown: none before the last committed one is kept for readers."""
    return max(as_of or 0, job.newest or 0)
