"""This module opens readers of committed steps, and fills ranges of the arena with bytes of these steps.

This module must never let a reader see a step that is being overwritten: it waits until the step is whole, or refuses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from storage.base.errors import ConflictError
from storage.jobs.admission import Admission
from storage.memory.scratch import ScratchRanges
from storage.state.versions import Job
from storage.steps.commit import Committer
from storage.steps.reader import RangeReader, StepReader
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.host import HostTier


class StepReaders:
    """Opens readers of committed steps (`StepReader`), for clients that read or keep a step while training goes on."""

    def __init__(
        self,
        host: HostTier,
        backing: BackingTiers,
        scratch: ScratchRanges,
        ranges: RangeReader,
        admission: Admission,
        committer: Committer,
    ) -> None:
        self._host = host
        self._backing = backing
        self._scratch = scratch
        self._ranges = ranges
        self._admission = admission
        self._committer = committer

    async def open(self, job: Job, step: int | None = None, *, unsettled: bool = False) -> StepReader:
        """Return a reader of a committed step, by default the newest settled one.

        The step's bytes are held until the reader is closed, while training goes on. Bytes that are only in host memory
        are written to NVMe first.

        Args:
            job: the job.
            step: the number of the step, or None for the newest settled one.
            unsettled: if `step` is None, take the newest step of this store instead, although other nodes may lack it.

        Raises:
            NotFoundError: the step is not retained.
            ConflictError: there is no such step yet.
            DataLossError: some of the step's bytes were kept in host memory only, and are overwritten.
            BudgetExceededError: nvme_budget has no room to keep the step beside the steps to come.
            DeviceStuckError: a device does not answer.
        """
        opening = self.hold(job, step, unsettled=unsettled)
        return await self._backing.watch.unless_stuck(opening, release=StepReader.close)

    async def hold(self, job: Job, step: int | None, *, unsettled: bool = False) -> StepReader:
        """Return a reader as `open` does, but wait without a time limit if a device does not answer."""
        await self._until_whole(job, settled=step is None and not unsettled)
        wanted = self.default_step(job, unsettled=unsettled) if step is None else step
        self._committer.check_retained(job, wanted)
        self._admission.reserve_for_reader(job)
        reader = StepReader(job, job.retained[wanted], self._ranges, self._backing)
        # From here on the admission counts the regions that the reader holds, and `close` frees them.
        self._admission.readers.add(reader)
        try:
            reader.versions = await self._committer.hold(job, wanted, reader.regions)
        except BaseException:
            reader.close()
            raise
        return reader

    async def _until_whole(self, job: Job, *, settled: bool) -> None:
        """Wait while the commit of a step overwrites bytes of the one before that are only in host memory.

        With `settled`, the newest settled step is to be read: if its bytes are overwritten, wait until the trainers
        have settled the next step, or their run has ended.
        """
        # The job is looked at again after each wait, because the next commit may have begun before this task runs
        # again.
        while job.tally.has_unbacked:
            if job.pending is not None and not job.pending.at_rest.is_set():
                await job.pending.at_rest.wait()
            elif settled and job.spec.local_ranks and job.settled_step != self._committer.newest_settled(job):
                await job.changed.wait()
            else:
                return

    def default_step(self, job: Job, *, unsettled: bool = False) -> int:
        """Return the newest settled step of a job; with `unsettled`, the newest one of this store.

        Raises:
            ConflictError: there is none.
        """
        step = job.newest if unsettled else self._committer.newest_settled(job)
        if step is None and job.newest is None:
            raise ConflictError(f"job {job.spec.name!r} has no committed step yet")
        if step is None:
            raise ConflictError(
                f"job {job.spec.name!r} is at step {job.newest} on this node, and no step is known to be on all of its "
                "nodes: start the job, which finds the newest step that all of them have, or name a step"
            )
        return step

    async def load(self, job: Job, nbytes: int, fill: Callable[[memoryview], Awaitable[None]]) -> ArenaRange:
        """Allocate a range of the arena, fill it with `fill`, and return it. It counts as the job's until it is freed.

        Args:
            job: the job.
            nbytes: the bytes that are wanted; the range has whole pages.
            fill: fills the view of the range that it gets. An example is `StepReader.fill`.

        Raises:
            BudgetExceededError: other bytes in use left no room for the range before the deadline.
            DeviceStuckError: a device does not answer.
            StorageError: `fill` has raised this.
        """
        return await self._backing.watch.unless_stuck(self._load(job, nbytes, fill), release=self._scratch.free)

    async def _load(self, job: Job, nbytes: int, fill: Callable[[memoryview], Awaitable[None]]) -> ArenaRange:
        range_ = await self._scratch.allocate(job.spec.name, nbytes)
        try:
            await fill(self._host.view(range_))
        except BaseException:
            self._scratch.free(range_)
            raise
        return range_
