"""The state of a slab: which versions of its bytes exist, and the copy of the newest one in the host tier, if any.

Plain records with the few rules that concern one slab; who changes them, and when, is written in the modules above.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from storage.errors import ConflictError, DataLossError
from storage.shard import GroupSpec, SlabKey, SlabSpec, TierName
from storage.tiers.arena import ArenaRange
from storage.tiers.nvme import NvmeRegion

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
class Slab:
    """One kind of one group."""

    key: SlabKey
    spec: SlabSpec
    numel: int
    # Whether every version goes to NVMe. Otherwise the host copy is all there is between snapshots.
    backed: bool
    # Complete versions on NVMe, by step, and which of them the catalog names.
    versions: dict[int, NvmeRegion] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    # The step of the newest bytes, committed or not; None: never written, which reads as zeros.
    latest: int | None = None
    # When an update made it so, by time.monotonic().
    updated_at: float = -math.inf
    # Set when the job, or this layout of it, was deleted: an operation that waited meanwhile must end.
    deleted: bool = False
    copy: HostCopy | None = None
    # Under way for a snapshot or a reader: the newest bytes must not change in place meanwhile.
    copy_write: CopyWrite | None = None

    def check_present(self) -> None:
        """Raise ConflictError if the slab was deleted while an operation waited for room or for a device."""
        if self.deleted:
            raise ConflictError(f"job {self.key.job_name!r} was deleted while {self.key} was waited for; open it again")

    async def unclaimed(self) -> None:
        """Wait until no snapshot or reader needs the newest bytes to stay as they are."""
        while self.copy_write is not None:
            await self.copy_write.over.wait()

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

    def source(self, step: int) -> NvmeRegion:
        """Where a version is on NVMe.

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
