"""The contracts of the tiers: the methods and properties by which the engine uses any tier.

Operators and clients see the properties in `Tier` of every tier. A `BackingTier` keeps versions of slabs. The one
`DurableTier` among the backing tiers is the one whose bytes a restart finds again. A `CopyTier` has clean copies of
versions on the durable tier, and nothing else. The host tier is no backing tier, because clients and kernels work in
its memory, and versions only pass through it. A new tier is a class in a file beside this one that fulfils
`BackingTier` or `CopyTier`; the caller of `Engine.open` makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import TierName
from storage.tiers.base import TierCounters
from storage.tiers.extents import Extent
from storage.tiers.health import Device
from storage.tiers.io_engine import Priority

RegionT = TypeVar("RegionT")
RegionT_co = TypeVar("RegionT_co", covariant=True)
ReadT = TypeVar("ReadT", bound="CopyRead")


class Tier(Protocol):
    """The properties that every tier reports to operators and clients. `Engine.tiers` lists the engine's tiers."""

    @property
    def name(self) -> TierName: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def counters(self) -> TierCounters: ...
    @property
    def queue_depth(self) -> int: ...

    @property
    def detail(self) -> str:
        """A text for operators that describes the tier's memory or files."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """The reasons why the tier is degraded, except stuck devices; empty if there are none. They may name jobs."""
        ...

    @property
    def bandwidth(self) -> float | None:
        """The measured bytes per second of the tier's devices; None for a tier that measures none."""
        ...

    async def close(self) -> None:
        """Wait for operations under way, and release files and memory."""
        ...


class Region(Protocol):
    """A run of bytes that a backing tier has allocated: one version of one slab.

    A region knows its tier, so that code which has a region reads it without knowing which tiers there are.
    """

    @property
    def tier(self) -> BackingTier[Any]: ...

    @property
    def label(self) -> str:
        """The name of the version, as `Slab.label` gives it."""
        ...

    @property
    def nbytes(self) -> int:
        """The size of the region in bytes, in whole pages."""
        ...

    @property
    def block_bytes(self) -> int:
        """The bytes that one checksum covers, so that reads and writes are made of whole blocks; see `SlabLayout`."""
        ...

    @property
    def holders(self) -> int:
        """The number of `free` calls until the bytes may be used for another region; 0 if that may have happened."""
        ...

    @property
    def doubtful(self) -> bool:
        """Whether a sync after a write to the region failed, so that the bytes must be written again elsewhere."""
        ...

    def verify(self, offset: int, buffer: memoryview) -> None:
        """Check whole blocks that `read_raw` has read from byte `offset` on. Any thread may call this.

        Raises:
            DamagedBlockError: the bytes are not those that were written.
        """
        ...

    def record(self, offset: int, buffer: memoryview) -> None:
        """Keep the checksums of whole blocks that `write_raw` is going to write. Any thread may call this."""
        ...


class Move(NamedTuple, Generic[RegionT_co]):
    """The bytes of a buffer on their way from or to a region, at byte `offset` of the region.

    `buffer` is page-aligned host memory. It covers whole checksum blocks, or ends with the region.
    """

    region: RegionT_co
    offset: int
    buffer: memoryview


class BackingTier(Tier, Protocol[RegionT]):
    """A tier that keeps versions of slabs, each in a region of its own that is never overwritten once it is complete.

    The engine moves bytes between host memory and backing tiers. `RegionT` is the tier's own class of regions; the
    engine passes a tier only regions that this tier has allocated. A tier knows nothing of shards or jobs. The engine
    calls all methods on the event loop's thread, so a tier does its blocking work on other threads.
    """

    @property
    def is_durable(self) -> bool:
        """Whether the bytes survive the end of the daemon and a power loss once they are synced.

        This is true for the one tier of an engine that fulfils `DurableTier`. The catalog names no version on any other
        tier: a snapshot copies such a version to the durable tier, and without a snapshot a restart loses it.
        """
        ...

    @property
    def devices(self) -> Sequence[Device]:
        """The devices that the tier's moves wait for. The engine watches them, and tells clients of stuck ones."""
        ...

    @property
    def new_regions(self) -> Collection[RegionT]:
        """Regions that a `new_version` block is filling and that belong to no slab yet."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Make sure that `nbytes` more can be allocated, so that a step does not fail in its middle for lack of space.

        Raises:
            BudgetExceededError: the tier has too little space; the message names the budget.
        """
        ...

    def new_version(
        self, nbytes: int, label: str, block_bytes: int = BLOCK_BYTES
    ) -> AbstractAsyncContextManager[RegionT]:
        """Allocate a region, which the body of the `with` block fills and gives to a slab.

        If the body fails or is cancelled, the region is freed:

            async with tier.new_version(slab.nbytes, slab.label(step)) as region:
                await tier.write_from(region, 0, view)
                slab.add_version(step, region)

        Args:
            nbytes: the size of the region, which the tier rounds up to whole pages.
            label: the name of the version, see `Slab.label`.
            block_bytes: the bytes that one checksum covers, see `SlabLayout`.

        Raises:
            BudgetExceededError: there is no room for the version.
        """
        ...

    def hold(self, *regions: RegionT) -> None:
        """Keep the bytes of all regions until `free` was called once more for each region.

        Raises:
            NotFoundError: all holders of a region have freed it. No region is held then.
        """
        ...

    def free(self, region: RegionT) -> None:
        """Release a region. When its last holder has released it, its bytes may be used for another region."""
        ...

    async def read_into(
        self, region: RegionT, offset: int, buffer: memoryview, priority: Priority = Priority.DEMAND
    ) -> None:
        """Fill `buffer` with whole blocks of the region from byte `offset` on, verified; see `read_many`."""
        ...

    async def write_from(
        self, region: RegionT, offset: int, buffer: memoryview, priority: Priority = Priority.UPDATE
    ) -> None:
        """Write `buffer`, whole blocks, to byte `offset` of the region, and keep its checksums."""
        ...

    async def read_many(self, moves: Sequence[Move[RegionT]], priority: Priority) -> None:
        """Fill the buffers of all moves with verified bytes. The regions are held until that is done.

        Raises:
            DamagedBlockError: a block does not have the bytes that were written, also when it is read again.
            DeviceError: the bytes cannot be read.
        """
        ...

    async def read_raw(self, moves: Sequence[Move[RegionT]], priority: Priority) -> None:
        """Fill the buffers of all moves like `read_many`, but without verifying them.

        The caller verifies them with `Region.verify` before it uses any byte, and reads wrong blocks again with
        `read_many`.
        """
        ...

    async def write_raw(self, moves: Sequence[Move[RegionT]], priority: Priority) -> None:
        """Write the buffers of all moves, whose checksums the caller has recorded with `Region.record`.

        The regions are held until that is done.
        """
        ...


class DurableTier(BackingTier[RegionT], Protocol[RegionT]):
    """The backing tier whose regions the catalog names: they are extents of data files, with checksums."""

    @property
    def damaged_blocks(self) -> int:
        """The number of blocks that were found damaged since the start."""
        ...

    async def sync(self) -> None:
        """Wait until the devices have all bytes that were written before this call.

        Raises:
            DeviceError: a device may have lost bytes that were written since the last sync. Their regions become
                `doubtful`.
        """
        ...

    def stored(self, region: RegionT) -> tuple[tuple[Extent, ...], bytes]:
        """Return the region's extents and checksums for the catalog. Any thread may call this."""
        ...

    def restored(
        self, extents: tuple[Extent, ...], checksums: bytes, label: str, nbytes: int, block_bytes: int
    ) -> RegionT:
        """Return the region of a version that is in the catalog, from the values that `stored` returned."""
        ...

    def is_damaged(self, region: RegionT) -> bool:
        """Return whether the region has pages that were found damaged and are never used again."""
        ...

    def damaged_bytes(self, regions: Iterable[RegionT]) -> int:
        """Return the number of damaged bytes that are never used again and lie outside of `regions`."""
        ...


class CopyRead(Protocol):
    """A read that a copy tier can make instead of the durable tier. A tier's own class may say where the copy is."""

    @property
    def move(self) -> Move[Region]: ...


class CopyTier(Tier, Protocol[ReadT]):
    """A tier that has only clean copies of versions on the durable tier, so that some reads need not go there.

    A copy tier may lose any copy at any moment, because the bytes are then read from the durable tier. `ReadT` is the
    tier's own class of reads. The engine calls all methods on the event loop's thread.
    """

    def start(self) -> None:
        """Begin the tier's work in the background, if it has any. The engine calls this once, when it is open."""
        ...

    def begin(self, region: Region, instead_of: Region | None, next_use: float) -> bool:
        """Allocate room for a copy of a version that will be written or was read; return whether this succeeded.

        `push` sends the bytes.

        Args:
            region: the region of the version on the durable tier.
            instead_of: the version that the same slab has until then, whose room the new one may take over.
            next_use: the trace position at which the bytes are needed next.
        """
        ...

    def forget(self, region: Region) -> None:
        """Forget the copies of a version whose region was freed, because no read will ask for them.

        The durable tier calls this whenever the last holder of a region has freed it.
        """
        ...

    def has(self, region: Region) -> bool:
        """Return whether the tier has all bytes of a version."""
        ...

    def split(
        self, moves: Sequence[Move[Region]], durable: TierCounters
    ) -> tuple[Sequence[Move[Region]], Sequence[ReadT]]:
        """Return the moves that this tier cannot make, and those that `read` can make.

        Args:
            moves: the reads from regions.
            durable: the counters of the durable tier, for a comparison of speeds.
        """
        ...

    async def read(self, reads: Sequence[ReadT], *, verified: bool) -> Sequence[Move[Region]]:
        """Fill the buffers of what `split` has returned, and return the moves that were not filled.

        The caller holds the regions. A filled buffer has the bytes that were pushed. With `verified` their checksums
        were compared with those of the regions, too; without `verified` the caller compares them.
        """
        ...

    async def push(self, moves: Sequence[Move[Region]]) -> None:
        """Copy the bytes of those moves for whose versions `begin` made room. It may be cancelled at any time.

        The tier must not use bytes of the buffers that were read after this has ended or was cancelled.
        """
        ...

    def patience(self, moves: Sequence[Move[Region]]) -> float:
        """Return for how many seconds an update may wait for its `push` after its write to the durable tier is done."""
        ...
