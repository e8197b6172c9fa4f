"""The state of a slab: which versions of its bytes exist, and the copy of the newest one in the host tier, if any.

Plain records with the few rules that concern one slab; who changes them, and when, is written in the modules above.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from storage.errors import ConflictError, DataLossError, NotFoundError
from storage.shard import GroupSpec, Kind, SlabKey, SlabSpec, TierName
from storage.tiers.arena import ArenaRange
from storage.tiers.base import round_up
from storage.tiers.contract import Region

NEVER = math.inf


@dataclass(slots=True, eq=False)
class HostCopy:
    """A slab's bytes in the arena. Pinned while somebody reads or writes them."""

    region: ArenaRange
    # The version of the bytes; None while they are being written: nobody may read them then.
    step: int | None
    # A copy at home stays: its slab's placement is the host tier.
    at_home: bool
    pins: int = 0
    # Trace position of the next use; what is needed last is dropped first.
    next_use: float = NEVER
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_of_use(self) -> bool:
        """Whether it holds bytes, or its slab's placement is the host tier."""
        return self.at_home or self.step is not None


@dataclass(slots=True, eq=False)
class CopyWrite:
    """The write of a slab's newest bytes to NVMe, for all who claim them; see copy_writes.py."""

    # Snapshots and readers that need the bytes on NVMe. The bytes do not change while there is one.
    claims: int = 0
    # Held by the claimant that writes.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Set when the last claim was released.
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Tally:
    """What the slabs of one job are and have, kept up by themselves: so that no commit, no registration and no listing
    has to look at all of them."""

    # Slabs that a commit has to look at: they have versions that the catalog does not name yet, or that some retained
    # step sees and others do not. The commit takes out those that are settled (see Slab.is_settled).
    # A dict for its order: runs that do the same are to be alike.
    changed: dict[Slab, None] = field(default_factory=dict)
    # Slabs whose newest bytes are in host memory only.
    unsaved: dict[Slab, None] = field(default_factory=dict)
    # Bytes of slabs, in whole pages, by the backing tier that every version goes to (see Slab.backing).
    by_backing: Counter[TierName | None] = field(default_factory=Counter)
    # Those of the slabs that have versions on a backing tier, by (Slab.backing, that tier, how many versions).
    by_versions: Counter[tuple[TierName | None, TierName, int]] = field(default_factory=Counter)
    # Bytes of slabs at home in the host tier, and of gradients.
    home_bytes: int = 0
    gradient_bytes: int = 0
    # Bytes of each parameter slab that only passes through the host tier, ascending.
    passing: list[int] = field(default_factory=list)
    # Copies in the host tier.
    copies: int = 0
    copied_bytes: int = 0
    # Elements of all shards.
    elements: int = 0

    @property
    def unsettled(self) -> dict[Slab, None]:
        """The slabs whose newest version is not the one that all retained steps see."""
        return self.changed | self.unsaved

    @property
    def has_unbacked(self) -> bool:
        """Whether some slab is in host memory only between snapshots."""
        return self.by_backing[None] > 0

    @property
    def paged_bytes(self) -> int:
        """Bytes of one version of all slabs."""
        return self.by_backing.total()

    def version_bytes(self, tier: TierName) -> int:
        """Return the bytes of all versions on a backing tier."""
        return sum(count * nbytes for (_, on, count), nbytes in self.by_versions.items() if on is tier)

    def missing_bytes(self, tier: TierName, wanted: Callable[[TierName | None], int]) -> int:
        """Return the bytes that a tier still needs for each slab to have `wanted(slab.backing)` versions there."""
        missing = Counter({backing: wanted(backing) * nbytes for backing, nbytes in self.by_backing.items()})
        for (backing, on, count), nbytes in self.by_versions.items():
            if on is tier:
                missing[backing] -= min(count, wanted(backing)) * nbytes
        return missing.total()

    def add(self, group: Group) -> None:
        """Count a group that is registered."""
        for slab in group.slabs:
            self.enter(slab)
        self.elements += sum(shard.numel for shard in group.spec.shards)
        self.gradient_bytes += group.gradient_bytes

    def remove(self, group: Group) -> None:
        """Count a group no more, whose registration failed and whose slabs have nothing."""
        for slab in group.slabs:
            self.leave(slab)
            self.changed.pop(slab, None)
            self.unsaved.pop(slab, None)
        self.elements -= sum(shard.numel for shard in group.spec.shards)
        self.gradient_bytes -= group.gradient_bytes

    def enter(self, slab: Slab) -> None:
        """Count a slab as it is now; `leave` comes before its placement changes."""
        self._count(slab, 1)
        if slab.at_home_in_host:
            self.home_bytes += slab.paged_bytes
        elif slab.key.kind is Kind.PARAM:
            bisect.insort(self.passing, slab.paged_bytes)

    def _count(self, slab: Slab, sign: int) -> None:
        self.by_backing[slab.backing] += sign * slab.paged_bytes
        for tier, count in Counter(region.tier.name for region in slab.versions.values()).items():
            self.by_versions[slab.backing, tier, count] += sign * slab.paged_bytes

    def settle(self, slab: Slab, oldest: int | None, *, recorded: bool) -> None:
        """Have commits look at a slab no more, if it is settled (see Slab.is_settled)."""
        if slab.is_settled(oldest, recorded=recorded):
            self.changed.pop(slab, None)

    def leave(self, slab: Slab) -> None:
        """Undo `enter`."""
        self._count(slab, -1)
        if slab.at_home_in_host:
            self.home_bytes -= slab.paged_bytes
        elif slab.key.kind is Kind.PARAM:
            del self.passing[bisect.bisect_left(self.passing, slab.paged_bytes)]


@dataclass(slots=True, eq=False)
class Slab:
    """One kind of one group."""

    key: SlabKey
    spec: SlabSpec
    numel: int
    # The backing tier that every version goes to; None: the host copy is all there is between snapshots.
    backing: TierName | None
    # That of its job.
    tally: Tally = field(default_factory=Tally, repr=False)
    # Which of the versions the catalog names.
    recorded: set[int] = field(default_factory=set)
    # When an update made the newest bytes what they are, by time.monotonic().
    updated_at: float = -math.inf
    # Set when the job, or this layout of it, was deleted: an operation that waited meanwhile must end.
    deleted: bool = False
    # Under way for a snapshot or a reader: the newest bytes must not change in place meanwhile.
    copy_write: CopyWrite | None = None
    _versions: dict[int, Region] = field(default_factory=dict)
    _latest: int | None = None
    _copy: HostCopy | None = None

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
        """Whether every version goes to a backing tier."""
        return self.backing is not None

    @property
    def versions(self) -> Mapping[int, Region]:
        """Complete versions on backing tiers, by step."""
        return self._versions

    def add_version(self, step: int, region: Region) -> Region | None:
        """Keep a region as the version of a step. Returns the one whose place it takes, for the caller to free."""
        before = self.pop_version(step)
        self._recount(region.tier.name, 1)
        self._versions[step] = region
        self._touch()
        return before

    def pop_version(self, step: int) -> Region | None:
        """Give up a version. Returns its region, which is the caller's to free, if there was one."""
        if step not in self._versions:
            return None
        self.recorded.discard(step)
        self._recount(self._versions[step].tier.name, -1)
        region = self._versions.pop(step)
        self._touch()
        return region

    def _recount(self, tier: TierName, more: int) -> None:
        """Count a version more, or less, on a tier."""
        count, by_versions = 0, self.tally.by_versions
        for region in self._versions.values():
            count += region.tier.name is tier
        if count:
            by_versions[self.backing, tier, count] -= self.paged_bytes
        if count + more:
            by_versions[self.backing, tier, count + more] += self.paged_bytes

    @property
    def latest(self) -> int | None:
        """The step of the newest bytes, committed or not; None: never written, which reads as zeros."""
        return self._latest

    @latest.setter
    def latest(self, step: int | None) -> None:
        self._latest = step
        self._touch()

    def _touch(self) -> None:
        """Have the next commit look at the slab."""
        self.tally.changed[self] = None
        if self._latest is None or self._latest in self._versions:
            self.tally.unsaved.pop(self, None)
        else:
            self.tally.unsaved[self] = None

    def is_settled(self, oldest: int | None, *, recorded: bool) -> bool:
        """Whether no commit and no roll-back has to look at the slab before it changes again.

        So it is where `oldest`, the oldest step that is kept, and all newer ones see the only version, which the
        catalog names (unless `recorded` is false: the job is never in there). One without versions on NVMe has none to
        record or to free; that its bytes are in host memory only is known apart.
        """
        if not self._versions:
            return True
        if oldest is None or self._latest is None or self._latest > oldest or self._versions.keys() != {self._latest}:
            return False
        return not recorded or self._latest in self.recorded

    @property
    def copy(self) -> HostCopy | None:
        """The copy in the host tier, of whatever version."""
        return self._copy

    @copy.setter
    def copy(self, copy: HostCopy | None) -> None:
        for one, sign in ((self._copy, -1), (copy, 1)):
            if one is not None:
                self.tally.copies += sign
                self.tally.copied_bytes += sign * one.region.nbytes
        self._copy = copy

    @property
    def paged_bytes(self) -> int:
        """Bytes in whole pages, as the tiers keep them."""
        return round_up(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes without padding to pages."""
        return self.numel * self.spec.dtype.itemsize

    @property
    def at_home_in_host(self) -> bool:
        """Whether the newest version stays in the host tier."""
        return self.spec.placement is TierName.HOST

    @property
    def current_copy(self) -> HostCopy | None:
        """The host copy, if it holds the newest bytes."""
        copy = self.copy
        return copy if copy is not None and copy.step is not None and copy.step == self.latest else None

    def label(self, step: int) -> str:
        """Names a version, for checksums and errors."""
        return f"{self.key.job}/{self.key.group}/{self.key.kind.value} at step {step}"

    def source(self, step: int) -> Region:
        """Where a version is on a backing tier.

        Raises:
            DataLossError: it was kept in host memory only.
        """
        if step not in self.versions:
            raise DataLossError(
                f"{self.key}: version {step} was kept in host memory only and is gone; "
                "set durability to 'step' or 'snapshot:N' for jobs that must survive this"
            )
        return self.versions[step]

    def version_at(self, step: int) -> int | None:
        """The newest version on NVMe that a reader of `step` sees."""
        # The usual case first: a commit asks for ten thousand slabs at once.
        if self.latest is not None and self.latest <= step and self.latest in self.versions:
            return self.latest
        return max((version for version in self.versions if version <= step), default=None)


@dataclass(slots=True, eq=False)
class Group:
    """A registered group and its slabs (all kinds but the gradient)."""

    spec: GroupSpec
    slabs: tuple[Slab, ...]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient in whole pages; 0: it has none."""
        return round_up(self.spec.slab_bytes(Kind.GRAD)) if Kind.GRAD in self.spec.slab_of_kind else 0

    def slab(self, kind: Kind, job: str) -> Slab:
        """Raises NotFoundError, naming the job, for a kind that the group does not have."""
        for slab in self.slabs:
            if slab.key.kind is kind:
                return slab
        raise NotFoundError(f"group {self.spec.name!r} of job {job!r} has no slab of kind {kind.value}")
