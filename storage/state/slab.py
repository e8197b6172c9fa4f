"""The state of a slab: which versions of its bytes exist, and the copy in the host tier, if any.

This module owns the rules that concern one slab, and the sums over a job's slabs. It must not decide when a version or
a copy is made or freed: the modules that import this one do that.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from storage.base.codec import SlabLayout
from storage.base.errors import ConflictError, DataLossError, NotFoundError
from storage.base.shard import GroupSpec, Kind, SlabKey, SlabSpec, TierName
from storage.tiers.arena import ArenaRange
from storage.tiers.base import round_up
from storage.tiers.contract import Region

NEVER = math.inf


@dataclass(slots=True, eq=False)
class HostCopy:
    """A slab's bytes in the arena. It is pinned while a task or a client reads or writes the bytes."""

    arena_range: ArenaRange
    # The step whose version the bytes are; None while they are being written, so that they must not be read.
    step: int | None
    # True if the slab is placed in the host tier. Such a copy is at home and is never evicted.
    at_home: bool
    pins: int = 0
    # True while an update or a client, which has pinned the copy, writes to it. No fetch may read bytes into the copy
    # meanwhile.
    is_written: bool = False
    # The trace position of the next use of the copy. The copy with the highest position is evicted first.
    next_use: float = NEVER
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_of_use(self) -> bool:
        """Whether the copy must be kept, because it holds bytes or its slab is placed in the host tier."""
        return self.at_home or self.step is not None


@dataclass(slots=True, eq=False)
class CopyWrite:
    """The write of a slab's newest bytes to NVMe, for all snapshots and readers that claim them; see copy_writes.py."""

    # The number of snapshots and readers that need the slab's newest bytes on NVMe. While it is above 0, no update or
    # put may change the bytes.
    claims: int = 0
    # The snapshot or reader that writes the bytes to NVMe holds this lock, so that they are written once.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    # This event is set when no snapshot or reader needs the bytes any more, so that a waiting update may change them.
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Tally:
    """The sums over the slabs of one layout of a job, and the slabs that a commit must look at.

    Each change of a slab updates the sums, so that no commit, registration or listing has to look at all slabs.
    """

    # Slabs that a commit has to look at: the catalog does not name all their versions yet, or the retained steps do not
    # all see the same version. A commit removes the slabs that are clean (see Slab.is_clean). This is a dict and
    # not a set because of its order, so that equal runs do equal things.
    changed: dict[Slab, None] = field(default_factory=dict)
    # Slabs whose newest bytes are in host memory only.
    unsaved: dict[Slab, None] = field(default_factory=dict)
    # The bytes of the slabs in whole pages, by the backing tier that new versions of the slab go to (see Slab.backing).
    by_backing: Counter[TierName | None] = field(default_factory=Counter)
    # Bytes of the slabs that have versions on a backing tier, in whole pages, by (the tier that new versions of the
    # slab go to, a tier that has versions of the slab, the number of versions on that tier). The two tiers differ, for
    # example, if the only version on the durable tier is a snapshot.
    by_versions: Counter[tuple[TierName | None, TierName, int]] = field(default_factory=Counter)
    # Bytes of the regions that are being filled with a further version, by (Slab.backing, tier of the region, number of
    # versions that the slab had on that tier before).
    being_filled: Counter[tuple[TierName | None, TierName, int]] = field(default_factory=Counter)
    # Bytes of the slabs that are placed in the host tier, and bytes of all gradients.
    home_bytes: int = 0
    gradient_bytes: int = 0
    # The sizes in bytes of all gradients, ascending, and those of the gradients that are placed on a backing tier.
    gradients: list[int] = field(default_factory=list)
    leaving_gradients: list[int] = field(default_factory=list)
    # The sizes in bytes of the parameter slabs that are not placed in the host tier, ascending.
    passing: list[int] = field(default_factory=list)
    # The copies in the host tier: their number and their bytes.
    copies: int = 0
    copied_bytes: int = 0
    # The number of elements of all shards.
    elements: int = 0

    @property
    def dirty(self) -> dict[Slab, None]:
        """The slabs that a roll-back must look at. All retained steps see the same bytes of every other slab."""
        return self.changed | self.unsaved

    @property
    def has_unbacked(self) -> bool:
        """Whether the job has a slab whose versions go to no backing tier between snapshots."""
        return self.by_backing[None] > 0

    @property
    def paged_bytes(self) -> int:
        """The bytes that one version of each slab takes, in whole pages."""
        return self.by_backing.total()

    def version_bytes(self, tier: TierName) -> int:
        """Return the bytes that all versions of all slabs take on a backing tier."""
        return sum(count * nbytes for (_, on, count), nbytes in self.by_versions.items() if on is tier)

    def missing_bytes(self, tier: TierName, wanted: Callable[[TierName | None], int]) -> int:
        """Return the bytes that a tier still needs for each slab to have `wanted(slab.backing)` versions there."""
        missing = Counter({backing: wanted(backing) * nbytes for backing, nbytes in self.by_backing.items()})
        for (backing, on, count), nbytes in self.by_versions.items():
            if on is tier:
                missing[backing] -= min(count, wanted(backing)) * nbytes
        return missing.total()

    def filling_bytes(self, tier: TierName, wanted: Callable[[TierName | None], int]) -> int:
        """Return the bytes on a tier that `missing_bytes` counts although their regions are allocated already.

        These regions are being filled. The caller subtracts the result, so that no room is reserved for them twice.
        """
        return sum(
            nbytes
            for (backing, on, count), nbytes in self.being_filled.items()
            if on is tier and count < wanted(backing)
        )

    def add(self, group: Group) -> None:
        """Add the slabs, the gradient and the elements of a registered group to the sums."""
        for slab in group.slabs:
            self.count(slab)
        self.elements += sum(shard.numel for shard in group.spec.shards)
        self.count_gradient(group)

    def remove(self, group: Group) -> None:
        """Remove a group from the sums because its registration failed; its slabs must have no bytes."""
        for slab in group.slabs:
            self.uncount(slab)
            self.changed.pop(slab, None)
            self.unsaved.pop(slab, None)
        self.elements -= sum(shard.numel for shard in group.spec.shards)
        self.uncount_gradient(group)

    def count_gradient(self, group: Group) -> None:
        """Add the gradient of a group, if any, to the sums. Call `uncount_gradient` before its placement changes."""
        if group.gradient_bytes:
            self.gradient_bytes += group.gradient_bytes
            for sizes in self._gradient_lists(group):
                bisect.insort(sizes, group.gradient_bytes)

    def uncount_gradient(self, group: Group) -> None:
        """Subtract the gradient of a group from the sums; this undoes `count_gradient`."""
        if group.gradient_bytes:
            self.gradient_bytes -= group.gradient_bytes
            for sizes in self._gradient_lists(group):
                del sizes[bisect.bisect_left(sizes, group.gradient_bytes)]

    def leaving_gradient_bytes(self, *, may_all: bool) -> int:
        """Return the bytes of the gradients that may leave host memory: all, or those placed on a backing tier."""
        return self.gradient_bytes if may_all else sum(self.leaving_gradients)

    def _gradient_lists(self, group: Group) -> list[list[int]]:
        return [self.gradients, self.leaving_gradients] if group.gradient_leaves_host else [self.gradients]

    def count(self, slab: Slab) -> None:
        """Add a slab, as it is now, to the sums. Call `uncount` before its placement changes."""
        self._count_tiers(slab, 1)
        if slab.at_home_in_host:
            self.home_bytes += slab.paged_bytes
        elif slab.key.kind is Kind.PARAM:
            bisect.insort(self.passing, slab.paged_bytes)

    def _count_tiers(self, slab: Slab, sign: int) -> None:
        """Add a slab's bytes to the sums by tier, or subtract them if `sign` is -1."""
        self.by_backing[slab.backing] += sign * slab.paged_bytes
        for tier, count in Counter(region.tier.name for region in slab.versions.values()).items():
            self.by_versions[slab.backing, tier, count] += sign * slab.paged_bytes

    def remove_if_clean(self, slab: Slab, oldest: int | None, *, recorded: bool) -> None:
        """Remove a slab from `changed`, so that commits do not look at it, if it is clean (see Slab.is_clean)."""
        if slab.is_clean(oldest, recorded=recorded):
            self.changed.pop(slab, None)

    def uncount(self, slab: Slab) -> None:
        """Subtract a slab from the sums; this undoes `count`."""
        self._count_tiers(slab, -1)
        if slab.at_home_in_host:
            self.home_bytes -= slab.paged_bytes
        elif slab.key.kind is Kind.PARAM:
            del self.passing[bisect.bisect_left(self.passing, slab.paged_bytes)]


@dataclass(slots=True, eq=False)
class Slab:
    """The record of one slab: where its versions and its host copy are. The tiers have the bytes."""

    key: SlabKey
    spec: SlabSpec
    numel: int
    # The backing tier that each new version goes to. It is None if the bytes are only in host memory between two
    # snapshots.
    backing: TierName | None
    # The tally of the slab's job.
    tally: Tally = field(default_factory=Tally, repr=False)
    # The steps of the versions that the catalog names.
    recorded: set[int] = field(default_factory=set)
    # The time, by time.monotonic(), at which an update wrote the newest bytes.
    updated_at: float = -math.inf
    # True once the job, or this layout of it, was deleted. An operation that waited for the slab meanwhile must then
    # raise.
    deleted: bool = False
    # A number that changes whenever the newest bytes of this slab change, so that readers notice a change. Two versions
    # may have the same step, because a step that was withdrawn or rolled back is made again.
    stamp: int = 0
    # The write of the newest bytes to NVMe for a snapshot or a reader, if one is under way. No update may change the
    # bytes until it ends.
    copy_write: CopyWrite | None = None
    # The layout says how the elements lie in the bytes of a version. It never changes, and is kept because a store of a
    # million slabs asks for it several million times when it is opened.
    layout: SlabLayout = field(init=False)
    _versions: dict[int, Region] = field(default_factory=dict)
    _latest: int | None = None
    _copy: HostCopy | None = None

    def __post_init__(self) -> None:
        self.layout = self.spec.layout(self.numel)

    def check_present(self) -> None:
        """Raise ConflictError if the slab was deleted while an operation waited for room or for a device."""
        if self.deleted:
            raise ConflictError(f"job {self.key.job_name!r} was deleted while {self.key} was waited for; open it again")

    async def unclaimed(self) -> None:
        """Wait until no snapshot or reader needs the newest bytes to stay as they are."""
        while self.copy_write is not None:
            await self.copy_write.over.wait()

    @property
    def backed(self) -> bool:
        """Whether each version goes to a backing tier when it is made. Otherwise only snapshots write it to one."""
        return self.backing is not None

    @property
    def versions(self) -> Mapping[int, Region]:
        """The regions of the complete versions on backing tiers, by the step that wrote each version."""
        return self._versions

    def add_version(self, step: int, region: Region) -> Region | None:
        """Keep a region as the version of a step. Return the region that it replaces, if any; the caller frees it."""
        before = self.pop_version(step)
        self._recount(region.tier.name, 1)
        self._versions[step] = region
        self._touch()
        return before

    def pop_version(self, step: int) -> Region | None:
        """Remove the version of a step. Return its region, if there was one, which the caller frees."""
        if step not in self._versions:
            return None
        self.recorded.discard(step)
        self._recount(self._versions[step].tier.name, -1)
        region = self._versions.pop(step)
        self._touch()
        return region

    def _recount(self, tier: TierName, more: int) -> None:
        """Update the tally, because the slab has one version more (`more` = 1) or less (-1) on a tier."""
        count, by_versions = 0, self.tally.by_versions
        for region in self._versions.values():
            count += region.tier.name is tier
        if count:
            by_versions[self.backing, tier, count] -= self.paged_bytes
        if count + more:
            by_versions[self.backing, tier, count + more] += self.paged_bytes

    @contextmanager
    def filling(self, region: Region) -> Iterator[None]:
        """Count a region in the tally while the `with` block fills it, so that the admission reserves no room twice."""
        tier = region.tier.name
        key = self.backing, tier, sum(one.tier.name is tier for one in self.versions.values())
        self.tally.being_filled[key] += region.nbytes
        try:
            yield
        finally:
            self.tally.being_filled[key] -= region.nbytes

    @property
    def latest(self) -> int | None:
        """The step of the newest bytes, committed or not.

        None if the slab was never written; its bytes are then zeros.
        """
        return self._latest

    @latest.setter
    def latest(self, step: int | None) -> None:
        self._latest = step
        self.stamp += 1
        self._touch()

    def _touch(self) -> None:
        """Mark the slab for the next commit to look at, and note whether only host memory has its newest bytes."""
        self.tally.changed[self] = None
        if self._latest is None or self._latest in self._versions:
            self.tally.unsaved.pop(self, None)
        else:
            self.tally.unsaved[self] = None

    def is_clean(self, oldest: int | None, *, recorded: bool) -> bool:
        """Return whether no commit and no roll-back has to look at the slab before it changes again.

        A slab is clean if it has only one version, which `oldest` (the oldest retained step) and all newer steps see
        and which the catalog names. A slab without versions on NVMe is clean, too, because it has no version to record
        or to free. If its newest bytes are in host memory only, `Tally.unsaved` has it.

        Args:
            recorded: whether the catalog must name the version; false for a job that is never in the catalog.
        """
        if not self._versions:
            return True
        if oldest is None or self._latest is None or self._latest > oldest or self._versions.keys() != {self._latest}:
            return False
        return not recorded or self._latest in self.recorded

    @property
    def copy(self) -> HostCopy | None:
        """The copy in the host tier, which may hold another version than the newest; None if there is no copy."""
        return self._copy

    @copy.setter
    def copy(self, copy: HostCopy | None) -> None:
        for one, sign in ((self._copy, -1), (copy, 1)):
            if one is not None:
                self.tally.copies += sign
                self.tally.copied_bytes += sign * one.arena_range.nbytes
        self._copy = copy

    @property
    def paged_bytes(self) -> int:
        """The size of one version in bytes, rounded up to whole pages, as the tiers keep it."""
        return round_up(self.nbytes)

    @property
    def nbytes(self) -> int:
        """The size of one version in bytes, without padding to pages."""
        return self.layout.nbytes

    @property
    def at_home_in_host(self) -> bool:
        """Whether the slab is placed in the host tier, so that its newest version stays there."""
        return self.spec.placement is TierName.HOST

    @property
    def current_copy(self) -> HostCopy | None:
        """The host copy if it holds the newest bytes; None otherwise."""
        copy = self.copy
        return copy if copy is not None and copy.step is not None and copy.step == self.latest else None

    def copy_of(self, region: Region) -> HostCopy | None:
        """Return the host copy of the version in a region; None if there is none."""
        copy = self.current_copy
        return copy if copy is not None and copy.step is not None and self.versions.get(copy.step) is region else None

    def label(self, step: int) -> str:
        """Return a name for a version, for traces, checksums and error texts."""
        return self.key.label(step)

    def source(self, step: int) -> Region:
        """Return the region of a version on a backing tier.

        Raises:
            DataLossError: the version was kept in host memory only.
        """
        if step not in self.versions:
            raise DataLossError(
                f"{self.key}: version {step} was kept in host memory only and is gone; "
                "set durability to 'step' or 'snapshot:N' for jobs that must survive this"
            )
        return self.versions[step]

    def version_at(self, step: int) -> int | None:
        """Return the newest version on a backing tier that a reader of `step` sees; None if there is none."""
        # The case that the newest version is on a backing tier is the usual one. It is tested first, because a commit
        # calls this for ten thousand slabs.
        if self.latest is not None and self.latest <= step and self.latest in self.versions:
            return self.latest
        return max((version for version in self.versions if version <= step), default=None)


@dataclass(slots=True, eq=False)
class Group:
    """A group that a rank has registered, and its slabs: one of each kind but the gradient, which has no versions."""

    spec: GroupSpec
    slabs: tuple[Slab, ...]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the group's gradient, rounded up to whole pages; 0 if it has none."""
        return round_up(self.spec.layout(Kind.GRAD).nbytes) if Kind.GRAD in self.spec.slab_of_kind else 0

    @property
    def gradient_leaves_host(self) -> bool:
        """Whether the group's gradient is placed on a backing tier, so that it leaves the arena once it is parked."""
        gradient = self.spec.slab_of_kind.get(Kind.GRAD)
        return gradient is not None and gradient.placement is not TierName.HOST

    def slab(self, kind: Kind, job: str) -> Slab:
        """Return the slab of a kind.

        Args:
            job: the name of the job, for the error text.

        Raises:
            NotFoundError: the group does not have the kind.
        """
        for slab in self.slabs:
            if slab.key.kind is kind:
                return slab
        raise NotFoundError(f"group {self.spec.name!r} of job {job!r} has no slab of kind {kind.value}")
