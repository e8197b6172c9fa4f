"""The life of the pending step: its updates and puts, its seal, and its commit or its end without a commit.

This module owns the tasks that write a pending step. A step is open while gradients arrive, and sealed when its commit
begins; from then on it is finished even if ranks die. This module must not change bytes that are only in host memory
before the seal, because until then the step can be abandoned, and these are the only bytes of the last committed step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from storage.base.codec import EncodedLayout, encode
from storage.base.errors import ConflictError, StepAbortedError
from storage.base.shard import Kind, SlabKey
from storage.base.slices import in_slices
from storage.base.tracing import Activity, Tracer
from storage.base.waiting import first_of, unlogged
from storage.catalog.records import CommitRecord
from storage.memory.gradients import Gradients
from storage.memory.host_cache import HostCache
from storage.memory.parkable import Gradient
from storage.memory.scratch import ScratchRanges
from storage.memory.shadows import Shadows
from storage.state.slab import NEVER, Group, HostCopy, Slab
from storage.state.versions import Job, PendingStep
from storage.steps.commit import Committer
from storage.steps.tile import Kernel
from storage.steps.transform import Transformer, Work
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.host import HostTier


class PendingSteps:
    """Starts the updates and puts of pending steps, and commits, withdraws or abandons them, for all jobs.

    The daemon calls it for the requests of ranks, and `Engine.commit` and `Engine.roll_back` end steps through it.
    """

    def __init__(
        self,
        host: HostTier,
        backing: BackingTiers,
        host_cache: HostCache,
        scratch: ScratchRanges,
        gradients: Gradients,
        tracer: Tracer,
        transformer: Transformer,
        shadows: Shadows,
        committer: Committer,
    ) -> None:
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._scratch = scratch
        self._gradients = gradients
        self._tracer = tracer
        self._transformer = transformer
        self._shadows = shadows
        self._committer = committer

    async def allocate_gradient(self, job: Job, group: str) -> Gradient:
        """Allocate a gradient of a group in the arena. It stays until `update` has used it or the caller frees it.

        Raises:
            ConflictError: the group is frozen.
            BudgetExceededError: other bytes in use left no room for the gradient before the deadline.
            StorageError: gradients had to be spilled to make room, and this failed.
        """
        spec = job.group(group).spec
        if Kind.GRAD not in spec.slab_of_kind:
            raise ConflictError(
                f"group {group!r} of job {job.spec.name!r} is frozen: it was registered without a gradient"
            )
        # While a step is being committed, a new gradient belongs to the step after it.
        step = job.next_step + (job.pending is not None and job.pending.sealed.is_set())
        key = SlabKey(job.spec.identity, group, Kind.GRAD)
        return await self._gradients.allocate(job.spec.name, key, job.group(group), step)

    def check_update(self, job: Job, step: int, group: str) -> None:
        """Check that `update` would accept this group in this step now.

        Raises:
            ConflictError: it would not.
            StepAbortedError: the job is being rolled back.
        """
        pending = self._pending_after_the_first(job, step)
        if any(slab in pending.writes for slab in job.group(group).slabs):
            raise ConflictError(f"group {group!r} was updated in step {step} already, or a part of it was put")
        if Kind.GRAD not in job.group(group).spec.slab_of_kind:
            raise ConflictError(f"group {group!r} is frozen: it was registered without a gradient")

    def update(
        self,
        job: Job,
        step: int,
        group: str,
        gradient: Gradient,
        kernel: Kernel,
        *,
        position: float = NEVER,
        keeps_gradient: bool = False,
        aside: bool = False,
    ) -> asyncio.Task[None]:
        """Start the update of a group to version `step`, and return its task. `commit` reports a failed update.

        The gradient is freed when the update is done, and may be parked or spilled meanwhile. If a slab of the group is
        in host memory only, the update waits until `commit` is called, or goes `aside`: before that the step can still
        be abandoned, and the update would overwrite the only bytes of the last committed step.

        Args:
            job: the job.
            step: the pending step.
            group: the name of the group.
            gradient: its gradient for this step, with the values; the client writes to it no more.
            kernel: called in an optimizer thread for each part of the group, whose `UpdateTile` it updates in place.
            position: the trace position of the group. Among the updates that wait, the one with the lowest position
                runs next.
            keeps_gradient: if true, the update does not free the gradient; the caller frees it after the update is done
                or withdrawn.
            aside: an update of bytes that are in host memory only does not wait for the commit if there is room for a
                second copy of its slabs (shadows, see shadows.py). Such an update takes one and a half times the
                processor time.

        Raises:
            ConflictError, StepAbortedError: see `check_update`.
        """
        self.check_update(job, step, group)
        slabs = job.group(group).slabs
        gradient.waits_for_seal = not all(slab.backed for slab in slabs)
        updating = self._update(job, job.group(group), step, gradient, kernel, position, aside=aside)
        update = self._begin(job, step, slabs, updating)
        gradient.update = update
        if not keeps_gradient:
            self._gradients.free_after(update, gradient)
        return update

    async def withdraw(self, job: Job, step: int, group: str) -> None:
        """Undo the update of a group in the pending step, if there is one.

        Afterwards the group is as the last committed step left it, and may be updated again.

        Raises:
            ConflictError: `step` is not the pending step, or is being committed.
            DeviceStuckError: a device does not answer; the update is undone as soon as it does.
        """
        await self._backing.watch.unless_stuck(self._withdraw(job, step, group))

    async def _withdraw(self, job: Job, step: int, group: str) -> None:
        """Stop the update of a group, or undo it, so that its slabs are as the last committed step left them."""
        pending = self._pending_after_the_first(job, step)
        slabs = [slab for slab in job.group(group).slabs if slab in pending.writes]
        if not slabs:
            return
        writes = {pending.writes[slab] for slab in slabs}
        _stop(writes)
        await asyncio.wait(writes)
        # While the cancelled update ended, a commit of the step may have begun, so wait until it is over. The commit
        # raises if it finds the cancelled update in the step. If the update was done before it could be cancelled, it
        # belongs to the committed step, and the withdrawal fails.
        await pending.at_rest.wait()
        while self._committer.in_doubt:
            await self._committer.resolve_doubt()
            await pending.at_rest.wait()
        if job.newest is not None and job.newest >= step:
            raise ConflictError(f"step {step} was committed while group {group!r} was being withdrawn from it")
        # If the step was abandoned while this withdrawal waited, `abandon` discards all updates of the step, so the
        # withdrawal has nothing left to undo.
        if job.pending is pending and not pending.abandoned:
            for slab in slabs:
                pending.writes.pop(slab, None)
            self._committer.withdraw(job, slabs)

    def _check_put(self, job: Job, step: int, slab: Slab) -> None:
        """Raise ConflictError unless `put` would accept this slab in this step now."""
        pending = self._pending_after_the_first(job, step)
        if slab in pending.writes:
            raise ConflictError(f"{slab.key} was put in step {step} already, or its group was updated")

    def _pending_after_the_first(self, job: Job, step: int) -> PendingStep:
        """Return the pending step with the number `step`, to which the caller adds updates and puts.

        Raises:
            ConflictError: see `_open`; or the step is the job's first step, which takes initial values only.
            StepAbortedError: the job is being rolled back.
        """
        pending = self._open(job, step)
        if job.newest is None:
            raise ConflictError(
                f"step {step} takes initial values and nothing else: stage and publish them, and commit it"
            )
        return pending

    @staticmethod
    def _open(job: Job, step: int) -> PendingStep:
        """Return the pending step with the number `step`, and begin the step if no step is pending.

        Raises:
            ConflictError: the step is being committed or abandoned, is not above the last committed one, or another
                step is pending.
            StepAbortedError: the job is being rolled back, which gives up the bytes that the step is computed from.
        """
        if job.rolling_back.locked():
            raise StepAbortedError(
                f"job {job.spec.name!r} is being rolled back, so step {step} cannot be prepared or committed; wait for "
                "the roll-back, and go on from the step that it goes back to"
            )
        pending = job.open_pending(step)
        pending.check_open()
        return pending

    async def allocate_put(self, job: Job, step: int, group: str, kind: Kind) -> ArenaRange:
        """Allocate a range of the arena for the bytes that `put` gives a slab at a step after the first, and return it.

        The range belongs to the caller until the caller passes it to `put` or frees it.

        Raises:
            ConflictError: `step` is not the next step, or the slab was written in it already.
            StepAbortedError: the job is being rolled back.
            BudgetExceededError: other bytes in use left no room for the slab before the deadline.
        """
        slab = job.slab(group, kind)
        self._check_put(job, step, slab)
        return await self._scratch.allocate(job.spec.name, slab.layout.element_bytes)

    async def put(self, job: Job, step: int, group: str, kind: Kind, staged: ArenaRange) -> None:
        """Make staged bytes the slab's version of the pending step.

        The engine takes the range `staged` over: on success it becomes the slab's host copy, on failure it is freed.
        The version of the last committed step is kept beside the new one. This returns when the bytes are on the slab's
        backing tier. A slab without a backing tier takes the bytes only when `commit` is called. `commit` reports a
        failed put, too.

        Raises:
            ConflictError: see `allocate_put`.
            StepAbortedError: the step was abandoned.
            BudgetExceededError: nvme_budget or the disk has no room for the bytes.
            DeviceError: the bytes cannot be written.
            DeviceStuckError: a device does not answer; the slab takes the bytes as soon as it does.
        """
        try:
            slab = job.slab(group, kind)
            if isinstance(slab.layout, EncodedLayout):
                staged = await self._encode(job, slab, slab.layout, staged)
            self._check_put(job, step, slab)
        except BaseException:
            self._scratch.free(staged)
            raise
        write = self._begin(job, step, [slab], self._put(job, step, slab, staged))
        write.add_done_callback(lambda done: self._end_put(staged, done))
        if slab.backed:
            await self._backing.watch.unless_stuck(_outcome(write))

    async def _encode(self, job: Job, slab: Slab, layout: EncodedLayout, staged: ArenaRange) -> ArenaRange:
        """Return a range with the records of staged elements, and free the range of the elements."""
        encoded = await self._scratch.allocate(job.spec.name, slab.nbytes)
        try:
            elements = self._host.tensor(staged, slab.spec.dtype, slab.numel)
            await encode(layout, elements, 0, self._host.view(encoded))
        except BaseException:
            self._scratch.free(encoded)
            raise
        self._scratch.free(staged)
        return encoded

    def _end_put(self, staged: ArenaRange, write: asyncio.Task[None]) -> None:
        if write.cancelled() or write.exception() is not None:
            self._scratch.free(staged)
        else:
            self._scratch.hand_over(staged)

    def _begin(
        self, job: Job, step: int, slabs: Sequence[Slab], writing: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """Start the task `writing`, which writes slabs in the pending step, and return it."""
        # The commit of the step raises the first error of its updates and puts, so asyncio does not have to log the
        # error of this task.
        task = unlogged(asyncio.ensure_future(writing))
        job.open_pending(step).writes.update(dict.fromkeys(slabs, task))
        return task

    async def _put(self, job: Job, step: int, slab: Slab, staged: ArenaRange) -> None:
        pending = job.pending
        assert pending is not None
        if not slab.backed:
            # A put waits for the step's seal before it replaces a slab's only bytes, because until then the step can be
            # abandoned, and the old bytes are in host memory only.
            await pending.sealed.wait()
        await slab.unclaimed()
        if slab.backing is not None:
            async with self._backing.new_version(
                slab.backing, slab.nbytes, slab.label(step), slab.layout.block_bytes
            ) as region:
                with slab.filling(region):
                    await region.tier.write_from(region, 0, self._host.view(staged))
                    slab.add_version(step, region)
        slab.latest = step
        # The range with the put's bytes becomes the slab's host copy. Readers that have pinned the old copy keep it
        # until they release it.
        self._host_cache.free_copy(slab)
        self._host_cache.adopt(slab, HostCopy(staged, step=step, at_home=slab.at_home_in_host))

    async def _update(
        self, job: Job, group: Group, step: int, gradient: Gradient, kernel: Kernel, position: float, *, aside: bool
    ) -> None:
        pending = job.pending
        assert pending is not None
        low_precision = any(slab.key.kind is Kind.MASTER for slab in group.slabs)
        reads = frozenset(s.key.kind for s in group.slabs if not (low_precision and s.key.kind is Kind.PARAM))
        tracer, key = self._tracer, group.slabs[0].key
        label = f"{key.job}/{key.group}/step {step}"
        work = Work(
            group=group,
            step=step,
            reads=reads,
            gradient=gradient,
            kernel=tracer.traced(Activity.OPTIMIZER, label, kernel),
            position=position,
        )
        if gradient.waits_for_seal:
            if aside and await self._update_aside(pending, work, label):
                return
            # An update waits for the step's seal before it overwrites the only bytes of the last committed step,
            # because until then the step can be abandoned.
            await pending.sealed.wait()
            gradient.waits_for_seal = False
        with tracer.span(Activity.UPDATE, label):
            await self._transformer.run(work)

    async def _update_aside(self, pending: PendingStep, work: Work, label: str) -> bool:
        """Update a group in shadows of its slabs before the seal; make the shadows the slabs' copies after the seal.

        Returns:
            False: there was no room for shadows, or they were given up for other bytes, or the step was sealed first.
            The caller must still make the update.
        """
        if pending.sealed.is_set() or any(slab.backed for slab in work.group.slabs):
            return False
        with self._shadows.of(work.group) as shadow:
            if shadow is None:
                return False
            work.gradient.waits_for_seal = False
            with self._tracer.span(Activity.UPDATE, label):
                written = await self._transformer.run_aside(work, shadow.copies, pending.sealed.is_set)
            if not written:
                return False
            # The gradient may be spilled from here on, because it is read once more only if the shadows are given up.
            work.gradient.waits_for_seal = True
            self._shadows.written(shadow)
            await first_of(pending.sealed, shadow.given_up)
            if shadow.given_up.is_set():
                return False
            while claimed := next((slab for slab in work.group.slabs if slab.copy_write is not None), None):
                await claimed.unclaimed()
            # The group may have been placed elsewhere meanwhile, so that its new versions must be written to a backing
            # tier. The update's results in the shadows, which are only in host memory, are then not used.
            if shadow.given_up.is_set() or any(slab.backed for slab in work.group.slabs):
                return False
            work.gradient.waits_for_seal = False
            for slab, copy in self._shadows.adopt(shadow).items():
                copy.step = slab.latest = work.step
                slab.updated_at = time.monotonic()
                # Readers that have pinned the former copy keep it until they release it, so it can be taken away from
                # the slab.
                self._host_cache.free_copy(slab)
                self._host_cache.adopt(slab, copy)
            return True

    async def commit(self, job: Job, step: int, client_states: Mapping[int, bytes], settled: int | None) -> bool:
        """Seal the step and finish it; return whether it is durable already."""
        pending = self._open(job, step)
        pending.at_rest.clear()
        try:
            # Wait for the snapshot before the step is sealed. If the snapshot has failed, the client can repeat the
            # commit, because no bytes are overwritten before the seal.
            await self._committer.finish_snapshot(job, step)
            # A step that cannot be committed is not sealed, so that it can still be abandoned without loss.
            _check_writes(job, step, [write for write in pending.writes.values() if write.done()])
            pending.sealed.set()
            await self._finish_writes(job, pending)
            record = CommitRecord(step=step, committed_at=time.time(), client_states=dict(client_states))
            with self._tracer.span(Activity.COMMIT, f"{job.spec.identity}/all groups/step {step}"):
                durable = await self._committer.commit(job, record, settled)
            job.pending = None
            job.announce()
            return durable
        finally:
            pending.at_rest.set()

    async def _finish_writes(self, job: Job, pending: PendingStep) -> None:
        """Wait until all writes of the step are done, and raise an error if the step cannot be committed."""
        step = pending.step
        # A withdrawal that is under way leaves its cancelled update in the step until this commit has ended, so this
        # commit finds the cancelled update and fails.
        writes = list(pending.writes.values())
        if writes:
            await asyncio.wait(writes)
            _check_writes(job, step, writes)
        async for slab in in_slices(list(job.slabs()) if job.newest is None else ()):
            if slab.key.kind in (Kind.PARAM, Kind.MASTER) and slab.latest is None:
                raise ConflictError(f"{slab.key} has no initial values; publish them before step {step} is committed")

    async def roll_back(self, job: Job, step: int, *, is_ordered: bool) -> None:
        """Make a committed step the newest one again; see `Engine.roll_back`.

        If this is called twice for one job, the second call waits for the first.
        """
        async with job.rolling_back:
            await self.abandon(job)
            await self._committer.roll_back(job, step, is_ordered=is_ordered)

    async def abandon(self, job: Job) -> None:
        """Stop the writes of an unfinished step and discard their results. A commit under way is finished first."""
        pending = job.pending
        if pending is None:
            return
        if not pending.sealed.is_set() and not pending.abandoned:
            _stop(set(pending.writes.values()))
        await pending.at_rest.wait()
        pending.abandoned = True
        if pending.writes:
            await asyncio.wait(pending.writes.values())
        await self._committer.finish_snapshot_to_return_to(job)
        await self._committer.resolve_doubt()
        if job.pending is pending:
            job.pending = None
            self._committer.abandon_pending(job)


def _check_writes(job: Job, step: int, writes: Iterable[asyncio.Task[None]]) -> None:
    """Raise the error of an update or put that has failed, because the step cannot be committed without it."""
    for write in writes:
        if write.cancelled():
            raise StepAbortedError(f"step {step} of job {job.spec.name!r} was abandoned")
        if error := write.exception():
            raise error


def _stop(writes: Iterable[asyncio.Task[None]]) -> None:
    """Cancel the tasks of updates and puts."""
    for write in writes:
        # Each update or put is cancelled only once, because a second cancellation would interrupt the cleanup that the
        # first one began.
        if not write.cancelling():
            write.cancel()


async def _outcome(write: asyncio.Task[None]) -> None:
    """Wait for an update or a put of a step, and raise its error. It goes on if this call is cancelled."""
    await asyncio.wait([write])
    if write.cancelled():
        raise StepAbortedError(
            "the step was abandoned while its bytes were written; resume from the last committed one"
        )
    write.result()
