"""The choice of bytes for a reader of a slab: the newest ones, or those that a given step leaves, during any write.

This module must never show a reader a later step than it asked for. It owns no bytes: a copy belongs to its slab or to
the reader.
"""

from __future__ import annotations

import asyncio

from storage.errors import ConflictError, StepAbortedError
from storage.host_cache import HostCache
from storage.prefetch import PrefetchQueue
from storage.slab import HostCopy, Slab
from storage.tiers.backing import BackingTiers
from storage.tiers.host import HostTier
from storage.versions import Job


class DemandReads:
    """The demand fetches of all jobs. `Engine.fetch` says what these methods raise."""

    def __init__(self, host: HostTier, backing: BackingTiers, host_cache: HostCache, queue: PrefetchQueue) -> None:
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._queue = queue

    async def fetch(self, job: Job, slab: Slab, position: float, as_of: int | None) -> HostCopy:
        """Return a pinned copy of a slab's bytes; see `Engine.fetch`."""
        write = job.pending.writes.get(slab) if job.pending else None
        if write is None and slab.current_copy is not None:
            return await self._queue.fetch(slab, position)
        return await self._backing.watch.unless_stuck(
            self._fetch(job, slab, position, as_of), release=lambda copy: self._host_cache.unpin(slab, copy)
        )

    def sees_newest(self, job: Job, slab: Slab, as_of: int | None) -> bool:
        """Return whether `fetch` would return the newest bytes without waiting for a write."""
        pending = job.pending
        write = pending.writes.get(slab) if pending else None
        is_wanted = pending is not None and (as_of is None or as_of >= pending.step)
        if write is not None and is_wanted and (not write.done() or write.cancelled() or write.exception() is not None):
            return False
        return slab.latest is not None and (as_of is None or slab.latest <= _bound(job, as_of))

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
        # If there still is a write here, the slab is in host memory only, and the write has not begun: it waits until
        # the step is sealed, and then until all readers of the copy have released the copy.
        copy = await self._queue.fetch(slab, position)
        if as_of is None or copy.step is None or copy.step <= _bound(job, as_of):
            return copy
        # While this read waited for the device, a client sent an update for a later step, and the update ran first.
        self._host_cache.unpin(slab, copy)
        return await self._read(job, slab, as_of)

    async def _read(self, job: Job, slab: Slab, as_of: int | None) -> HostCopy:
        """Return a pinned copy of a slab's bytes as a committed step left them.

        The copy belongs to this reader alone.
        """
        copy = HostCopy(await self._host_cache.room_for(slab), step=None, at_home=False)
        self._host_cache.pin(copy)
        try:
            bound = _bound(job, as_of)
            if not slab.backed and bound not in job.durable:
                raise ConflictError(
                    f"{slab.key} cannot be read as of step {bound} any more: only host memory had its bytes, and step "
                    f"{slab.latest}, which is being committed, has replaced them; read it as of step {slab.latest}"
                )
            version = slab.version_at(bound)
            view = self._host.view(copy.arena_range)
            if version is None:
                # No step up to the wanted one has written the slab, so its bytes are zeros.
                view[:] = bytes(len(view))
            else:
                await self._backing.read_into(slab.source(version), 0, view)
        except BaseException:
            self._host_cache.unpin(slab, copy)
            raise
        copy.step = version
        return copy


def _bound(job: Job, as_of: int | None) -> int:
    """Return the newest step that the reader may see. Readers never get a step before the last committed one."""
    return max(as_of or 0, job.newest or 0)
