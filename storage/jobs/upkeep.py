"""The operations of operators on a running store: they list steps, verify bytes, and evict and promote copies.

This module owns nothing. It must never change the bytes of a version, and must never make a client's request wait:
verification has the lowest priority, and copies are brought into free room only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.base.errors import ConflictError, StorageError
from storage.base.shard import TierName
from storage.base.slices import in_slices
from storage.catalog.records import CommitRecord
from storage.memory.host_cache import HostCache
from storage.memory.prefetch import PrefetchQueue
from storage.state.job_table import JobTable
from storage.state.slab import Slab
from storage.state.versions import Job
from storage.steps.reader import StepReader
from storage.steps.scrub import Scrubber
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import BackingTier, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStep:
    """A committed step whose bytes the store holds, as the list of a job's steps shows it to operators.

    Attributes:
        record: the commit.
        layout, world_size: the layout of the job in which it was made, and the number of its ranks.
        is_newest: whether it is the newest one of this store.
        is_settled: whether all nodes of the job are known to have it.
        is_retained: whether the job can return to it.
        is_durable: whether it survives a crash.
        kept_as: the names under which it is kept.
        readers: the number of open readers of it.
        size_bytes: its bytes on each tier. A copy in host memory counts beside the version that it is a copy of.
        alone_bytes: its bytes on backing tiers that no other step of the job needs.
    """

    record: CommitRecord
    layout: str
    world_size: int
    is_newest: bool
    is_settled: bool
    is_retained: bool
    is_durable: bool
    kept_as: tuple[str, ...]
    readers: int
    size_bytes: Mapping[TierName, int]
    alone_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The progress of `Upkeep.verify` after one read; `damage` is the error if the bytes of this read are damaged."""

    verified_bytes: int
    total_bytes: int
    damage: StorageError | None


@dataclass(slots=True, kw_only=True)
class Moved:
    """The result of an eviction or a promotion of copies in host memory.

    Attributes:
        slabs, nbytes: the number and the bytes of the slabs that were evicted, or brought into host memory.
        present_bytes: the bytes that were in host memory before a promotion began.
        left_bytes: the bytes that were not moved, because they are in use or because there is no room.
    """

    slabs: int = 0
    nbytes: int = 0
    present_bytes: int = 0
    left_bytes: int = 0


def versions_on(tier: BackingTier[Any], jobs: Iterable[Job]) -> Iterator[Region]:
    """Yield the regions of all versions of some jobs on a tier, each once.

    The caller may wait between two regions, because a store may have a million of them. A caller that waits gets no
    version that was added meanwhile to a slab that was visited before, and may get a version that was freed meanwhile.
    """
    seen: set[Region] = set()
    for job in jobs:
        # The groups and versions are copied, because they may change while the caller waits.
        for group in list(job.groups.values()):
            for slab in group.slabs:
                for region in list(slab.versions.values()):
                    if region.tier is tier and region not in seen:
                        seen.add(region)
                        yield region


class Upkeep:
    """Carries out the requests of operators on one store: it lists, verifies, evicts and promotes."""

    def __init__(
        self,
        jobs: JobTable,
        backing: BackingTiers,
        host_cache: HostCache,
        queue: PrefetchQueue,
        scrubber: Scrubber,
        readers: Iterable[StepReader],
    ) -> None:
        """Keep the parts of the engine. `readers` always has the open readers of all jobs."""
        self._readers = readers
        self._jobs = jobs
        self._backing = backing
        self._host_cache = host_cache
        self._queue = queue
        self._scrubber = scrubber
        self._verifying = False

    async def steps(self, name: str) -> Sequence[HeldStep]:
        """Return the steps of a job that the store holds, oldest first. This visits all slabs of the job.

        Raises:
            NotFoundError: the store has neither a job nor a kept step of this name.
        """
        # Closed readers are not checked. They hold no regions, but stay in the set of readers until no session refers
        # to them.
        readers = [reader for reader in self._readers if reader.regions]
        found = _Found()
        for layout in self._layouts(name):
            await found.add_layout(layout)
        for kept in list(self._jobs.kept_steps(name).values()):
            (record,) = kept.retained.values()
            step = found.step(kept, record)
            step.kept_as.append(kept.spec.kept)
            step.is_durable = True
            step.regions.update(region for slab in kept.slabs() for region in slab.versions.values())
        for reader in readers:
            if reader.job.spec.name == name:
                step = found.step(reader.job, reader.record)
                step.readers += 1
                step.regions.update(region for region in reader.regions.values() if region is not None)
        return found.held()

    def _layouts(self, name: str) -> Sequence[Job]:
        """Return a job in all its layouts; empty if only kept steps of it are left.

        Raise NotFoundError if the store has neither the job nor a kept step of it.
        """
        if name not in self._jobs.by_name and self._jobs.kept_steps(name):
            return []
        return self._jobs.layouts(name)

    async def verify(self, name: str | None = None) -> AsyncGenerator[Verified, None]:
        """Read and verify all committed bytes of one job or of all, and yield the progress after each read.

        Raises:
            NotFoundError: the store has neither a job nor a kept step of this name.
            ConflictError: another verification is under way.
        """
        if name is None:
            jobs = [*self._jobs, *self._jobs.all_kept()]
        else:
            jobs = [*self._layouts(name), *self._jobs.kept_steps(name).values()]
        if self._verifying:
            raise ConflictError("another verification is under way; wait for its end")
        self._verifying = True
        try:
            regions: list[Region] = []
            total = verified = 0
            async for region in in_slices(versions_on(self._backing.durable, jobs)):
                regions.append(region)
                total += region.nbytes
            yield Verified(verified_bytes=0, total_bytes=total, damage=None)
            for region in regions:
                async for nbytes, damage in self._scrubber.verify(region):
                    verified += nbytes
                    yield Verified(verified_bytes=verified, total_bytes=total, damage=damage)
        finally:
            self._verifying = False

    async def evict_copies(self, name: str | None = None) -> Moved:
        """Evict the copies of one job, or of all, that are not in use and not placed in host memory.

        Raises:
            NotFoundError: the store has no job of this name.
        """
        moved = Moved()
        async for _, slab in _slabs(list(self._jobs) if name is None else self._jobs.layouts(name)):
            if (copy := slab.copy) is None:
                continue
            nbytes = copy.arena_range.nbytes
            if self._host_cache.evict(slab):
                moved.slabs += 1
                moved.nbytes += nbytes
            else:
                moved.left_bytes += nbytes
        return moved

    async def promote(self, name: str) -> Moved:
        """Bring the newest bytes of a job into host memory, as far as there is free room. Nothing is evicted for them.

        Raises:
            NotFoundError: the store has no job of this name.
            DeviceStuckError: a device does not answer.
        """
        moved = Moved()
        async for job, slab in _slabs(self._jobs.layouts(name)):
            if slab.latest is None:
                continue
            if slab.current_copy is not None:
                moved.present_bytes += slab.paged_bytes
            elif _may_be_promoted(job, slab) and await self._promote(slab):
                moved.slabs += 1
                moved.nbytes += slab.paged_bytes
            else:
                moved.left_bytes += slab.paged_bytes
        return moved

    async def _promote(self, slab: Slab) -> bool:
        return not slab.deleted and await self._backing.watch.unless_stuck(self._queue.promote(slab))


async def _slabs(jobs: Iterable[Job]) -> AsyncIterator[tuple[Job, Slab]]:
    """Yield each slab of some jobs together with its job.

    Between two slabs the event loop may run its other tasks, because a store may have a million slabs.
    """
    for job in jobs:
        async for slab in in_slices(list(job.slabs())):
            yield job, slab


def _may_be_promoted(job: Job, slab: Slab) -> bool:
    """Return whether a slab's newest bytes may be brought into host memory now.

    The answer is no while an update writes the slab, or while a client writes initial values to its place in host
    memory.
    """
    write = None if job.pending is None else job.pending.writes.get(slab)
    if write is not None and not write.done():
        return False
    if slab.copy is None:
        # A slab whose home is host memory gets its copy when a run registers the slab, and this copy is never evicted.
        # So while such a slab has no copy, it waits for a run to register it, and is not promoted.
        return not slab.at_home_in_host
    return not slab.copy.is_written


@dataclass(slots=True, kw_only=True)
class _Step:
    """What `_Found` knows of one committed step: its properties, and the regions and copies that hold its bytes."""

    record: CommitRecord
    layout: str
    world_size: int
    is_newest: bool = False
    is_settled: bool = False
    is_retained: bool = False
    is_durable: bool = False
    kept_as: list[str] = field(default_factory=list)
    readers: int = 0
    regions: set[Region] = field(default_factory=set)
    host_bytes: int = 0


class _Found:
    """The steps of one job that `Upkeep.steps` has found so far: retained ones, kept ones, and those of readers."""

    def __init__(self) -> None:
        # A step is found by its job, its number and the time of its commit, because a step that a job commits again
        # after a roll-back has the same number as before.
        self._steps: dict[tuple[str, int, float], _Step] = {}

    def step(self, job: Job, record: CommitRecord) -> _Step:
        """Return the entry of a commit in this collection. If there is none, add an entry without bytes."""
        key = (job.spec.identity, record.step, record.committed_at)
        if key not in self._steps:
            self._steps[key] = _Step(record=record, layout=job.spec.layout, world_size=job.spec.world_size)
        return self._steps[key]

    async def add_layout(self, job: Job) -> None:
        """Enter the retained steps of one layout of the job into this collection, and count the bytes of each step."""
        newest, durable = job.newest, set(job.durable)
        steps = {number: self.step(job, record) for number, record in job.retained.items()}
        for number, step in steps.items():
            step.is_newest = number == newest and job.unfinished_successor is job.successor
            step.is_retained, step.is_durable = True, number in durable
            step.is_settled = job.settled is not None and number <= job.settled
        async for slab in in_slices(list(job.slabs())):
            for number, step in steps.items():
                version = _version_seen(slab, number, is_durable=number in durable)
                if version is None:
                    continue
                if (region := slab.versions.get(version)) is not None:
                    step.regions.add(region)
                if slab.copy is not None and slab.copy.step == version:
                    step.host_bytes += slab.copy.arena_range.nbytes

    def held(self) -> Sequence[HeldStep]:
        """Return all steps that were found, oldest first, with the sizes of their bytes."""
        holders = Counter(region for step in self._steps.values() for region in step.regions)
        ordered = sorted(self._steps.values(), key=lambda step: (step.record.step, step.record.committed_at))
        return [_held(step, holders) for step in ordered]


def _version_seen(slab: Slab, step: int, *, is_durable: bool) -> int | None:
    """Return the version of a slab that a step sees; None if there is none, or if the version's bytes are gone."""
    if slab.backed or is_durable:
        return slab.version_at(step)
    return slab.latest if slab.latest is not None and slab.latest <= step else None


def _held(step: _Step, holders: Mapping[Region, int]) -> HeldStep:
    size: Counter[TierName] = Counter({TierName.HOST: step.host_bytes})
    for region in step.regions:
        size[region.tier.name] += region.nbytes
    return HeldStep(
        record=step.record,
        layout=step.layout,
        world_size=step.world_size,
        is_newest=step.is_newest,
        is_settled=step.is_settled,
        is_retained=step.is_retained,
        is_durable=step.is_durable,
        kept_as=tuple(sorted(step.kept_as)),
        readers=step.readers,
        size_bytes=size,
        alone_bytes=sum(region.nbytes for region in step.regions if holders[region] == 1),
    )
