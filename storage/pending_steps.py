"""The life of the step under way: its updates and puts, the seal, its commit or its end.

A step is open while gradients come in, sealed when its commit begins, and then finished whoever dies. What is in host
memory only is not touched before the seal: until then the step can be abandoned, and its old bytes are nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from storage.catalog.records import CommitRecord
from storage.commit import Committer
from storage.errors import ConflictError, StepAbortedError
from storage.host_cache import HostCache
from storage.shard import Kind
from storage.slab import Group, HostCopy, Slab
from storage.slices import in_slices
from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeTier
from storage.tracing import Activity
from storage.transform import Kernel, Transformer
from storage.versions import Job, PendingStep
from storage.waiting import unlogged


class PendingSteps:
    """Prepares and finishes steps; what a method raises is said at the engine's of the same name."""

    def __init__(
        self, host: HostTier, nvme: NvmeTier, host_cache: HostCache, transformer: Transformer, committer: Committer
    ) -> None:
        self._host = host
        self._nvme = nvme
        self._host_cache = host_cache
        self._transformer = transformer
        self._committer = committer

    def check_update(self, job: Job, step: int, group: str) -> None:
        """Raises ConflictError unless `update` would take this group in this step now."""
        pending = self._pending_after_the_first(job, step)
        if any(slab in pending.writes for slab in job.group(group).slabs):
            raise ConflictError(f"group {group!r} was updated in step {step} already, or a part of it was put")
        if Kind.GRAD not in job.group(group).spec.slab_of_kind:
            raise ConflictError(f"group {group!r} is frozen: it was registered without a gradient")

    def update(
        self, job: Job, step: int, group: str, gradient: ArenaRange, kernel: Kernel, position: float
    ) -> asyncio.Task[None]:
        """Begins the update of a group, which uses the gradient until it is done."""
        self.check_update(job, step, group)
        slabs = job.group(group).slabs
        return self._begin(job, step, slabs, self._update(job, job.group(group), step, gradient, kernel, position))

    async def withdraw(self, job: Job, step: int, group: str) -> None:
        """Stops the update of a group, or undoes it: its slabs are as the last committed step left them."""
        pending = self._pending_after_the_first(job, step)
        slabs = [slab for slab in job.group(group).slabs if slab in pending.writes]
        if not slabs:
            return
        writes = {pending.writes[slab] for slab in slabs}
        _stop(writes)
        await asyncio.wait(writes)
        # The end of the step may have come meanwhile, and discards all of it.
        if job.pending is pending and not pending.abandoned:
            for slab in slabs:
                pending.writes.pop(slab, None)
            self._committer.discard(job, slabs)

    def check_put(self, job: Job, step: int, slab: Slab) -> None:
        """Raises ConflictError unless `put` would take this slab in this step now."""
        pending = self._pending_after_the_first(job, step)
        if slab in pending.writes:
            raise ConflictError(f"{slab.key} was put in step {step} already, or its group was updated")

    def _pending_after_the_first(self, job: Job, step: int) -> PendingStep:
        pending = job.open_pending(step)
        pending.check_open()
        if job.newest is None:
            raise ConflictError(
                f"step {step} takes initial values and nothing else: stage and publish them, and commit it"
            )
        return pending

    def put(self, job: Job, step: int, slab: Slab, staged: ArenaRange) -> asyncio.Task[None]:
        """Begins to make staged bytes the slab's version `step`; the range is the slab's once that is done."""
        self.check_put(job, step, slab)
        return self._begin(job, step, [slab], self._put(job, step, slab, staged))

    def _begin(
        self, job: Job, step: int, slabs: Sequence[Slab], writing: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        # `commit` raises the first failure.
        task = unlogged(asyncio.ensure_future(writing))
        job.open_pending(step).writes.update(dict.fromkeys(slabs, task))
        return task

    async def _put(self, job: Job, step: int, slab: Slab, staged: ArenaRange) -> None:
        pending = job.pending
        assert pending is not None
        if not slab.backed:
            # As for an update: until the seal the step can be abandoned, and the old bytes are nowhere else.
            await pending.sealed.wait()
        await slab.unclaimed()
        if slab.backed:
            async with self._nvme.new_version(slab.nbytes, slab.label(step)) as region:
                await self._nvme.write_from(region, 0, self._host.view(staged))
                slab.add_version(step, region)
        slab.latest = step
        # The staged range takes the place of the copy, whose readers keep what they have.
        self._host_cache.detach(slab)
        self._host_cache.adopt(slab, HostCopy(staged, step=step, at_home=slab.at_home_in_host))

    async def _update(
        self, job: Job, group: Group, step: int, gradient: ArenaRange, kernel: Kernel, position: float
    ) -> None:
        pending = job.pending
        assert pending is not None
        if not all(slab.backed for slab in group.slabs):
            # The old bytes are in one place only: touch them when nothing can stop the step any more.
            await pending.sealed.wait()
        dtype = group.spec.slab_of_kind[Kind.GRAD].dtype
        low_precision = any(slab.key.kind is Kind.MASTER for slab in group.slabs)
        reads = frozenset(s.key.kind for s in group.slabs if not (low_precision and s.key.kind is Kind.PARAM))
        tracer, key = self._nvme.tracer, group.slabs[0].key
        label = f"{key.job}/{key.group}/step {step}"
        with tracer.span(Activity.UPDATE, label):
            await self._transformer.run(
                group,
                step,
                reads=reads,
                gradient=self._host.tensor(gradient, dtype, group.spec.numel),
                kernel=tracer.traced(Activity.OPTIMIZER, label, kernel),
                position=position,
            )

    async def commit(self, job: Job, step: int, client_states: Mapping[int, bytes], settled: int) -> bool:
        """Seals the step and finishes it; returns whether it is durable already."""
        pending = job.open_pending(step)
        pending.check_open()
        pending.at_rest.clear()
        try:
            # Before the seal: when this raises, nothing has been overwritten, and the commit can be tried again.
            await self._committer.finish_snapshot(job, step)
            pending.sealed.set()
            await self._finish_writes(job, pending)
            record = CommitRecord(step=step, committed_at=time.time(), client_states=dict(client_states))
            with self._nvme.tracer.span(Activity.COMMIT, f"{job.spec.identity}/all groups/step {step}"):
                durable = await self._committer.commit(job, record, settled)
            job.pending = None
            job.announce()
            return durable
        finally:
            pending.at_rest.set()

    async def _finish_writes(self, job: Job, pending: PendingStep) -> None:
        """Returns when the step has all its bytes; raises what prevents that."""
        step = pending.step
        if pending.writes:
            await asyncio.wait(pending.writes.values())
            for write in pending.writes.values():
                if write.cancelled():
                    raise StepAbortedError(f"step {step} of job {job.spec.name!r} was abandoned")
                if error := write.exception():
                    raise error
        async for slab in in_slices(list(job.slabs()) if job.newest is None else ()):
            if slab.key.kind in (Kind.PARAM, Kind.MASTER) and slab.latest is None:
                raise ConflictError(f"{slab.key} has no initial values; publish them before step {step} is committed")

    async def roll_back(self, job: Job, step: int) -> None:
        """Makes a committed step the newest one again."""
        await self.abandon(job)
        await self._committer.roll_back(job, step)

    async def abandon(self, job: Job) -> None:
        """Stops the writes of an unfinished step and discards what they wrote. A commit under way is waited for."""
        pending = job.pending
        if pending is None:
            return
        if not pending.sealed.is_set() and not pending.abandoned:
            _stop(set(pending.writes.values()))
        await pending.at_rest.wait()
        pending.abandoned = True
        if pending.writes:
            await asyncio.wait(pending.writes.values())
        await self._committer.settle()
        if job.pending is pending:
            job.pending = None
            self._committer.discard_pending(job)


def _stop(writes: Iterable[asyncio.Task[None]]) -> None:
    for write in writes:
        # Once only: a second cancellation would break into the undoing that the first one began.
        if not write.cancelling():
            write.cancel()
