"""Slabs whose bytes are pinned in the arena: read on demand, or staged at the first step of their job.

A read gets the newest bytes, or those that a given step leaves, during any write. This module must never show a reader
a later step than it asked for. It owns no bytes: a copy belongs to its slab or to the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from storage.base.codec import EncodedLayout, decode, encode
from storage.base.errors import ConflictError, StepAbortedError
from storage.base.shard import Kind
from storage.memory.host_cache import HostCache
from storage.memory.prefetch import PrefetchQueue
from storage.memory.scratch import ScratchRanges
from storage.state.job_table import JobTable
from storage.state.slab import NEVER, HostCopy, Slab
from storage.state.versions import Job
from storage.steps.commit import Committer
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.host import HostTier


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A slab's elements in the arena, which stay in their place until `SlabPins` unpins or publishes them.

    Attributes:
        slab: the slab.
        copy: its host copy, which is pinned.
        decoded: for an encoded slab, the range that holds the elements; None for a plain one, whose copy holds them.
    """

    slab: Slab
    copy: HostCopy
    decoded: ArenaRange | None = None

    @property
    def arena_range(self) -> ArenaRange:
        """The range of the arena that holds the elements."""
        return self.copy.arena_range if self.decoded is None else self.decoded

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.slab.layout.element_bytes


class SlabPins:
    """Pins slabs in the arena for the sessions of all jobs, reads and prefetches them, and publishes staged bytes."""

    def __init__(
        self,
        host: HostTier,
        backing: BackingTiers,
        host_cache: HostCache,
        scratch: ScratchRanges,
        queue: PrefetchQueue,
        jobs: JobTable,
        committer: Committer,
    ) -> None:
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._scratch = scratch
        self._queue = queue
        self._jobs = jobs
        self._committer = committer

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
        write = job.pending.writes.get(slab) if job.pending else None
        if write is None and slab.current_copy is not None:
            copy = await self._queue.fetch(slab, position)
        else:
            fetching = self._fetch(job, slab, position, as_of)
            release = partial(self._host_cache.unpin, slab)
            copy = await self._backing.watch.unless_stuck(fetching, release=release)
        pin = Pin(slab, copy)
        return await self._decode(job, pin, slab.layout) if isinstance(slab.layout, EncodedLayout) else pin

    async def _decode(self, job: Job, pin: Pin, layout: EncodedLayout) -> Pin:
        """Return the pin of an encoded slab with a range that holds the decoded elements."""
        try:
            pin = replace(pin, decoded=await self._scratch.allocate(job.spec.name, pin.nbytes))
            records, elements = self._memory(pin)
            await decode(layout, records, 0, elements)
        except BaseException:
            self.unpin(pin)
            raise
        return pin

    def _memory(self, pin: Pin) -> tuple[memoryview, torch.Tensor]:
        """Return the records and the elements of an encoded slab that is pinned."""
        slab = pin.slab
        return self._host.view(pin.copy.arena_range), self._host.tensor(pin.arena_range, slab.spec.dtype, slab.numel)

    def newest_slab(self, job: Job, group: str, kind: Kind, as_of: int | None) -> Slab | None:
        """Return a slab if `fetch` would return its newest bytes without waiting for a write; else None.

        Raises:
            NotFoundError: the job has no such slab.
        """
        slab, pending = job.slab(group, kind), job.pending
        write = pending.writes.get(slab) if pending else None
        is_wanted = pending is not None and (as_of is None or as_of >= pending.step)
        if write is not None and is_wanted and (not write.done() or write.cancelled() or write.exception() is not None):
            return None
        sees_newest = slab.latest is not None and (as_of is None or slab.latest <= _bound(job, as_of))
        return slab if sees_newest else None

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
        # If the step under way still has an update or put of this slab here, it has not begun, and the slab is in host
        # memory only. The update waits until the step is sealed, and then until all readers of the copy have released
        # it. So the copy can be read.
        copy = await self._queue.fetch(slab, position)
        if as_of is None or copy.step is None or copy.step <= _bound(job, as_of):
            return copy
        # The fetched copy is of a later step than the reader may see: while this read waited for the device, a client
        # sent an update for that step, and the update ran first. So the older bytes are read from NVMe.
        self._host_cache.unpin(slab, copy)
        return await self._read(job, slab, as_of)

    async def _read(self, job: Job, slab: Slab, as_of: int | None) -> HostCopy:
        """Return a pinned copy of a slab's bytes as a committed step left them.

        The copy belongs to this reader alone, and is freed when the reader unpins it.
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
        self._queue.replace_window(owner, slabs, running)

    def unpin(self, pin: Pin, next_use: float = NEVER) -> None:
        """Release a pin. `next_use` is the trace position at which the slab is needed again."""
        if pin.decoded is not None:
            self._scratch.free(pin.decoded)
        self._host_cache.unpin(pin.slab, pin.copy, next_use)

    def take_range(self, pin: Pin) -> ArenaRange:
        """Release a pin whose range a client's process may still write to, and return the range.

        The caller frees the range when that process is gone.
        """
        if pin.decoded is None:
            return self._host_cache.take_range(pin.slab, pin.copy)
        self._host_cache.unpin(pin.slab, pin.copy)
        return self._scratch.hand_over(pin.decoded)

    async def stage(self, job: Job, group: str, kind: Kind) -> Pin:
        """Allocate and pin a host copy for the bytes that a slab has at its job's first step, and return the pin.

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
            range_ = await self._host_cache.room_for(slab)
            if slab.copy is not None:
                self._host.free(range_)
                raise ConflictError(f"{slab.key} is being written by another lease")
            slab.copy = HostCopy(range_, step=None, at_home=slab.at_home_in_host)
        elif slab.copy.pins:
            raise ConflictError(f"{slab.key} is being written by another lease")
        # A new write overwrites the bytes that an earlier `publish` left in this copy, so that version stays valid only
        # if it is on a backing tier, too.
        if not slab.backed:
            slab.latest = None
        self._host_cache.pin_to_write(slab.copy)
        pin = Pin(slab, slab.copy)
        if not isinstance(slab.layout, EncodedLayout):
            return pin
        try:
            return replace(pin, decoded=await self._scratch.allocate(job.spec.name, pin.nbytes))
        except BaseException:
            self.unpin(pin)
            raise

    async def publish(self, pin: Pin) -> None:
        """Make staged bytes the slab's version of its job's first step, and unpin them.

        Raises:
            ConflictError: that step is committed already, or being committed.
            StepAbortedError: the step was abandoned while the bytes were written.
            DeviceStuckError: a device does not answer; the bytes become that version as soon as it does.
        """
        await self._backing.watch.unless_stuck(self._publish(pin))

    async def _publish(self, pin: Pin) -> None:
        slab = pin.slab
        try:
            job = self._jobs.holder(slab.key)
            step = job.first_step
            pending = job.open_pending(step)
            if isinstance(slab.layout, EncodedLayout):
                records, elements = self._memory(pin)
                await encode(slab.layout, elements, 0, records)
            async with AsyncExitStack() as filling:
                if slab.backing is not None:
                    new = self._backing.new_version(
                        slab.backing, slab.nbytes, slab.label(step), slab.layout.block_bytes
                    )
                    region = await filling.enter_async_context(new)
                    filling.enter_context(slab.filling(region))
                    await region.tier.write_from(region, 0, self._host.view(pin.copy.arena_range))
                    if step in slab.versions:
                        # The slab has a version of this step from an earlier `publish`, which is freed below. A commit
                        # whose transaction failed may become valid after a crash and name that version, so the catalog
                        # first excludes this.
                        await self._committer.resolve_doubt()
                # The step is checked again after the write, because the step may have been committed or abandoned, or
                # the job deleted, while the bytes were written.
                job.open_pending(step).check_open()
                if job.pending is not pending:
                    raise StepAbortedError(f"the first step of job {job.spec.name!r} was abandoned; begin it again")
                if slab.backed and (old := slab.add_version(step, region)) is not None:
                    self._backing.free(old)
            slab.latest = step
            pin.copy.step = step
        finally:
            self.unpin(pin)


def _bound(job: Job, as_of: int | None) -> int:
    """Return the newest step whose bytes a read may return: `as_of`, or the last committed step if that is newer."""
    return max(as_of or 0, job.newest or 0)
