"""The contracts of the tiers: the methods and properties by which the engine uses any tier.

Operators and clients see the properties in `Tier` of every tier. A `BackingTier` keeps versions of slabs. The one
`DurableTier` among the backing tiers is the one whose bytes a restart finds again. The host tier is no backing tier,
because clients and kernels work in its memory, and versions only pass through it. A new tier is a class in a file
beside this one that fulfils `BackingTier`; `storage/assembly.py` makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from storage.base.shard import TierName
from storage.tiers.base import TierCounters
from storage.tiers.extents import Extent
from storage.tiers.health import Device
from storage.tiers.io_engine import Priority

RegionT = TypeVar("RegionT")
RegionT_co = TypeVar("RegionT_co", covariant=True)


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

    def new_version(self, nbytes: int, label: str) -> AbstractAsyncContextManager[RegionT]:
        """Allocate a region, which the body of the `with` block fills and gives to a slab.

        If the body fails or is cancelled, the region is freed:

            async with tier.new_version(slab.nbytes, slab.label(step)) as region:
                await tier.write_from(region, 0, view)
                slab.add_version(step, region)

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

    def restored(self, extents: tuple[Extent, ...], checksums: bytes, label: str, nbytes: int) -> RegionT:
        """Return the region of a version that is in the catalog, from the values that `stored` returned."""
        ...

    def is_damaged(self, region: RegionT) -> bool:
        """Return whether the region has pages that were found damaged and are never used again."""
        ...

    def damaged_bytes(self, regions: Iterable[RegionT]) -> int:
        """Return the number of damaged bytes that are never used again and lie outside of `regions`."""
        ...
