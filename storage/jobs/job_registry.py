"""The registry, which adds, changes and deletes jobs and groups, after admission.py has admitted the room they need.

This module must not own a table of jobs: the jobs are in job_table.py, because the admission and the damage log read
them, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

from storage.base.errors import (
    AlreadyExistsError,
    BudgetExceededError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from storage.base.shard import GroupSpec, JobSpec, Kind, SlabKey, SlabSpec, TierName
from storage.base.shown_sizes import shown_size
from storage.base.slices import in_slices
from storage.catalog.records import JobRecord, StoredVersion
from storage.jobs.admission import Admission, Limit
from storage.memory.host_cache import HostCache
from storage.state.job_table import JobTable
from storage.state.slab import Group, HostCopy, Slab
from storage.state.versions import Job, check_group, check_layout, check_model
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import Region
from storage.tiers.extents import Extent
from storage.tiers.host import HostTier


class JobRegistry:
    """Opens and deletes jobs in the job table of one store, gives them new layouts, and registers their groups.

    `Engine` calls these methods; the catalog is not changed here.
    """

    def __init__(
        self,
        jobs: JobTable,
        host: HostTier,
        backing: BackingTiers,
        host_cache: HostCache,
        admission: Admission,
    ) -> None:
        """Make a registry that adds jobs to the table `jobs` and removes them from it."""
        self._jobs = jobs
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self.admission = admission
        self._deleting: set[str] = set()

    def restore(self, stored: Iterable[JobRecord]) -> None:
        """Enter all jobs, as their last durable commits left them, and all kept steps into the job table.

        If `stored` has several layouts of a job, older ones come first.
        """
        # The regions by their extents, so that a version that belongs to a job and to several kept steps is one region,
        # which all of them hold.
        regions: dict[tuple[Extent, ...], Region] = {}
        for record in stored:
            job = self._restored(record, regions)
            if job.spec.kept:
                self._jobs.add_kept(job)
                continue
            if job.spec.name in self._jobs.by_name:
                self._replace(self._jobs.by_name[job.spec.name], job)
            self._jobs.by_name[job.spec.name] = job

    def find(self, spec: JobSpec, *, may_exist: bool, must_exist: bool) -> Job | None:
        """Return the job as it is now, or None if there is none. This raises what `Engine.open_job` raises.

        A caller that names a layout gets the job in any layout, if the models agree.
        """
        self.check_not_deleting(spec.name)
        job = self._jobs.by_name.get(spec.name)
        if job is None or job.newest is None:
            if must_exist:
                raise NotFoundError(f"job {spec.name!r} has no committed step to resume from, and resume is 'must'")
            return job
        if not may_exist:
            raise AlreadyExistsError(
                f"job {spec.name!r} has committed step {job.newest} and resume is 'never'; "
                "use another job name, or delete the job"
            )
        (check_model if spec.layout else check_layout)(job.spec, spec)
        return job

    def unfinished(self, spec: JobSpec) -> Job | None:
        """Return the job for a run that goes on with the job's unfinished step.

        Returns:
            The job; None if it has no unfinished step, or if its layout is another one than the run's.
        """
        self.check_not_deleting(spec.name)
        job = self._jobs.by_name.get(spec.name)
        if job is None or job.pending is None or job.pending.abandoned or not job.pending.at_rest.is_set():
            return None
        if job.successor is not None or not _fits(job.spec, spec) or job.spec.layout != spec.layout:
            return None
        job.spec = spec
        self.admission.forget_need()
        return job

    def attach(self, spec: JobSpec) -> Job:
        """Return the job for a new run: as it was committed, or a new one if it has no committed step."""
        self.check_not_deleting(spec.name)
        job = self._jobs.by_name.get(spec.name)
        if job is not None and job.newest is None:
            # `Engine.open_job` freed the uncommitted job of an earlier run before it called this method. So a job
            # without a committed step here is one that another client opened meanwhile, with few slabs or none. Freeing
            # these slabs at once does not block the event loop for long.
            self._remove(job)
            self._free_slabs(job.slabs())
            job = None
        if job is None:
            self._jobs.by_name[spec.name] = job = Job(spec, created_at=time.time())
        # The number of ranks on this node may have changed, so the job takes the specification of the new run. If the
        # run has another layout, the job keeps its own specification, without ranks, until the new layout replaces it.
        job.spec = replace(spec, layout=job.spec.layout) if _fits(job.spec, spec) else job.spec.without_ranks()
        self.admission.forget_need()
        return job

    async def lay_out(self, job: Job, spec: JobSpec, first_step: int) -> Job:
        """Return the job in a new layout; see `Engine.lay_out`.

        The caller has freed any other new layout of the job, and has abandoned its pending step.
        """
        name = spec.name
        self.check_not_deleting(name)
        if self._jobs.by_name.get(name) is not job:
            raise ConflictError(f"job {name!r} was deleted; open it again")
        if job.newest is None:
            job.first_step = first_step
            return job
        if any(spec.layout == other.spec.layout for other in self._jobs.layouts(name)):
            raise ConflictError(f"job {name!r} has a layout {spec.layout!r} already; name the new one differently")
        successor = job.successor = Job(spec, job.created_at, first_step=first_step)
        await self.free_copies(job)
        return successor

    def succeed(self, job: Job) -> None:
        """Make a layout the job's present one, because it has its first commit.

        If it is the present layout already, nothing changes.
        """
        before = self._jobs.by_name[job.spec.name]
        if before is not job:
            self._replace(before, job)
            self._jobs.by_name[job.spec.name] = job
            self.admission.forget_need()
            before.announce()

    def _replace(self, before: Job, job: Job) -> None:
        """Record in both layouts that the layout `job` replaces the layout `before` of the same job."""
        job.older = [*before.older, before]
        before.older, before.successor = [], job

    async def free_copies(self, job: Job) -> None:
        """Detach the ranks of an ended run from a job, and free its host copies (see `Engine.end_run`).

        Copies whose bytes are in host memory only are not freed.
        """
        job.spec = job.spec.without_ranks()
        async for slab in in_slices(list(job.slabs())):
            if job.spec.local_ranks:
                # Another run has attached the job since this call began, and needs the job's host copies, so no more of
                # them are freed.
                return
            if slab.backed or slab.latest is None or slab.latest in slab.versions:
                self._host_cache.free_copy(slab)
        self.admission.forget_need()

    @contextmanager
    def deleting(self, name: str) -> Iterator[Job | None]:
        """Return the job, and keep clients from opening or deleting it within the context.

        Without this, a run that began during the deletion would lose its job. The context yields None if only kept
        steps are left of the job, which is so after a restart if no commit of the job was durable.
        """
        job = self._jobs.by_name.get(name) if name in self._jobs.kept else self._jobs.job(name)
        self.check_not_deleting(name)
        self._deleting.add(name)
        try:
            yield job
        finally:
            self._deleting.remove(name)

    def check_not_deleting(self, name: str) -> None:
        """Raise ConflictError if the job with this name is being deleted now (see `deleting`)."""
        if name in self._deleting:
            raise ConflictError(f"job {name!r} is being deleted; try again when it is gone")

    async def free(self, job: Job) -> None:
        """Take one layout of a job out of memory, and free its bytes in all tiers; other tasks run in between.

        A repeated call has no effect. The catalog must not name the layout any more.
        """
        if self._jobs.has(job):
            self._remove(job)
            await self.free_slabs(list(job.slabs()))

    async def free_slabs(self, slabs: Iterable[Slab]) -> None:
        """Free the bytes of slabs in all tiers, and let the event loop run other tasks between them.

        The caller has removed the slabs from all tables.
        """
        walk = self._freeing(slabs)
        try:
            async for _ in in_slices(walk):
                pass
        finally:
            # If this call is cancelled, free the remaining slabs at once, because no table names them any more, so no
            # later call could free them.
            deque(walk, maxlen=0)

    def _remove(self, job: Job) -> None:
        """Take one layout of a job out of the job table. Its bytes stay, and the caller frees them."""
        current = self._jobs.by_name[job.spec.name]
        if current is job:
            del self._jobs.by_name[job.spec.name]
        elif current.successor is job:
            current.successor = None
        else:
            current.older.remove(job)
        self.admission.forget_need()
        job.announce()

    def _free_slabs(self, slabs: Iterable[Slab]) -> None:
        """Free the bytes of slabs in all tiers, before any other task of the event loop runs."""
        deque(self._freeing(slabs), maxlen=0)

    def _freeing(self, slabs: Iterable[Slab]) -> Iterator[None]:
        """Free the bytes of slabs in all tiers; yield after each slab.

        The versions are removed from the slabs as well, because a fetch that waits for room would otherwise read bytes
        that are freed here, and free them again.
        """
        for slab in slabs:
            slab.deleted = True
            self._host_cache.free_copy(slab)
            for step in list(slab.versions):
                if (region := slab.pop_version(step)) is not None:
                    self._backing.free(region)
            yield

    async def register(self, job: Job, specs: Sequence[GroupSpec], limits: Sequence[Limit]) -> dict[SlabKey, TierName]:
        """Register groups (see `Engine.register`); return the new placement of each slab whose placement changed."""
        until = self._host.deadline()
        # Groups are registered under the job's lock, because a registration takes many slices and waits for room, and
        # another registration may name the same groups.
        async with self._registering_until(job, until):
            if not self._jobs.has(job):
                raise ConflictError(f"job {job.spec.name!r} is not laid out as it was any more; open it again")
            known = {spec.name: group.spec for spec in specs if (group := job.groups.get(spec.name)) is not None}
            await asyncio.to_thread(_check_groups, known, specs, self._backing)
            new: list[Group] = []
            moved: dict[SlabKey, TierName] = {}
            with ExitStack() as undo:
                undo.callback(self._unregister, job, new)
                async for spec in in_slices(specs):
                    if (group := job.groups.get(spec.name)) is not None:
                        if known.get(spec.name) is not group.spec:
                            check_group(group.spec, spec)
                        moved |= self._update_placements(job, group, spec, undo)
                    else:
                        new.append(self._add_group(job, spec))
                for limit in limits:
                    self.admission.check_limit(job, limit)
                self.admission.check_host_budget(job)
                self.admission.reserve()
                await self._allocate_at_home([job.groups[spec.name] for spec in specs], until)
                await job.index.add(new)
                undo.pop_all()
        self.admission.forget_need()
        return moved

    @asynccontextmanager
    async def _registering_until(self, job: Job, until: float) -> AsyncIterator[None]:
        """Hold the lock of a job's registrations. Raise BudgetExceededError if the lock is not free before `until`."""
        try:
            async with asyncio.timeout_at(until):
                await job.registering.acquire()
        except TimeoutError:
            raise BudgetExceededError(
                f"host_budget {shown_size(self._host.budget_bytes)} had no room for other groups of job "
                f"{job.spec.name!r} that are being registered, and these waited for them until "
                "admission_timeout_seconds were over; return leases sooner, or raise host_budget or "
                "admission_timeout_seconds"
            ) from None
        try:
            yield
        finally:
            job.registering.release()

    def _unregister(self, job: Job, groups: Sequence[Group]) -> None:
        """Undo the registration of new groups, and free the bytes of their slabs."""
        job.index.remove(groups)
        for group in groups:
            del job.groups[group.spec.name]
            self._free_slabs(group.slabs)
            job.tally.remove(group)
        self.admission.forget_need()

    def _add_group(self, job: Job, spec: GroupSpec) -> Group:
        if job.newest is not None:
            raise ConflictError(
                f"job {job.spec.name!r} has no shard group {spec.name!r}: it was stored with another partition; "
                "resume with the same number of ranks, units and precision, or lay the job out anew (BeginLayout)"
            )
        return self.new_group(job, spec)

    def _update_placements(self, job: Job, group: Group, wanted: GroupSpec, undo: ExitStack) -> dict[SlabKey, TierName]:
        """Move the slabs of a stored group to the placements that the client wants; closing `undo` moves them back."""
        moved: dict[SlabKey, TierName] = {}
        for slab in group.slabs:
            placement = wanted.slab_of_kind[slab.key.kind].placement
            if placement is slab.spec.placement:
                continue
            if slab.latest is not None and slab.latest not in slab.versions:
                raise ConflictError(
                    f"{slab.key}: placement cannot change from {slab.spec.placement.value} to {placement.value} while "
                    "the newest version is in host memory only"
                )
            moved[slab.key] = placement
            undo.callback(self._place, job, slab, slab.spec)
            self._place(job, slab, replace(slab.spec, placement=placement))
        if Kind.GRAD in wanted.slab_of_kind:
            placement = wanted.slab_of_kind[Kind.GRAD].placement
            if placement is not group.spec.slab_of_kind[Kind.GRAD].placement:
                moved[SlabKey(job.spec.identity, group.spec.name, Kind.GRAD)] = placement
        undo.callback(self._change_spec, job, group, group.spec)
        self._change_spec(job, group, wanted)
        return moved

    @staticmethod
    def _change_spec(job: Job, group: Group, spec: GroupSpec) -> None:
        """Give a group another spec, which may have another placement of the gradient."""
        job.tally.uncount_gradient(group)
        group.spec = spec
        job.tally.count_gradient(group)

    def _place(self, job: Job, slab: Slab, spec: SlabSpec) -> None:
        """Give a slab another placement, and free its copy, because `HostCopy.at_home` may be wrong now."""
        job.tally.uncount(slab)
        slab.spec = spec
        slab.backing = self._backing_of(job.spec, spec)
        job.tally.count(slab)
        self._host_cache.free_copy(slab)

    async def _allocate_at_home(self, groups: Sequence[Group], until: float) -> None:
        """Allocate a copy for every slab that is placed in the host tier. The bytes are read when first needed."""
        async for slab in in_slices(slab for group in groups for slab in group.slabs):
            if slab.at_home_in_host and slab.copy is None:
                range_ = await self._host_cache.room_for(slab, until=until)
                slab.copy = HostCopy(range_, step=None, at_home=True)
                slab.copy.idle.set()

    def _backing_of(self, job: JobSpec, slab: SlabSpec) -> TierName | None:
        return self._backing.home_of(slab.placement, every_commit_is_durable=job.durability.every_steps == 1)

    def _new_group(self, job: Job, spec: GroupSpec) -> Group:
        identity = job.spec.identity
        slabs = tuple(
            Slab(SlabKey(identity, spec.name, slab.kind), slab, spec.numel, self._backing_of(job.spec, slab), job.tally)
            for slab in spec.slabs
            if slab.kind is not Kind.GRAD
        )
        return Group(spec, slabs)

    def new_group(self, job: Job, spec: GroupSpec) -> Group:
        """Return a group of a job, whose slabs have no bytes, and count it in the job's tally."""
        group = job.groups[spec.name] = self._new_group(job, spec)
        job.tally.add(group)
        return group

    def _restored(self, stored: JobRecord, regions: dict[tuple[Extent, ...], Region]) -> Job:
        """Make the job of a record of the catalog, and return it.

        `regions` has the regions that were restored before; this function adds those that it restores.
        """
        job = Job(stored.spec, stored.created_at, rolled_back=stored.rolled_back, settled=stored.settled)
        job.retained = {commit.step: commit for commit in stored.commits}
        job.durable = set(job.retained)
        job.first_step = min(job.retained, default=0)
        for spec in stored.groups:
            for slab in self.new_group(job, spec).slabs:
                for step, v in stored.versions.get(slab.key, {}).items():
                    slab.add_version(step, self._region(v, slab, step, regions))
                slab.recorded.update(slab.versions)
                slab.latest = max(slab.versions, default=None)
                job.tally.remove_if_clean(slab, min(job.durable, default=None), recorded=True)
        job.index.add_at_once(job.groups.values())
        # Compute the cached digest and the dictionary of the model's parameters at the start of the daemon. Computing
        # them later would make the client that opens the job, and all other clients, wait.
        _ = job.spec.model.digest, job.spec.model.by_name
        return job

    def _region(
        self, version: StoredVersion, slab: Slab, step: int, regions: dict[tuple[Extent, ...], Region]
    ) -> Region:
        """Return the region of a stored version.

        A job and its kept steps share versions. If the version was restored before, the result is the same region,
        held once more.
        """
        label, known = slab.label(step), regions.get(version.extents)
        if known is not None and known.label == label:
            self._backing.hold(known)
            return known
        region: Region = self._backing.durable.restored(
            version.extents, version.checksums, label, slab.paged_bytes, slab.layout.block_bytes
        )
        regions[version.extents] = region
        return region


def _check_groups(known: Mapping[str, GroupSpec], specs: Iterable[GroupSpec], backing: BackingTiers) -> None:
    """Check each group by itself, against the tiers of this store and against the stored group of the same name.

    Raises:
        InvalidRequestError: a group is malformed, or is placed on a tier that this store does not have.
        ConflictError: the stored group has other shards, kinds or types.
    """
    for spec in specs:
        spec.validate()
        for slab in spec.slabs:
            if slab.placement is not TierName.HOST and slab.placement not in backing:
                tiers = " or ".join([TierName.HOST, *(tier.name for tier in backing)])
                raise InvalidRequestError(
                    f"group {spec.name!r}: this store has no {slab.placement} tier; place the slab on {tiers}"
                )
        if spec.name in known:
            check_group(known[spec.name], spec)


def _fits(stored: JobSpec, wanted: JobSpec) -> bool:
    """Return whether a run with the specification `wanted` can go on in the stored layout of the job."""
    try:
        check_layout(stored, wanted)
    except ConflictError:
        return False
    return True
