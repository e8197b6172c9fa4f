"""The contracts of the tiers: what the engine asks of each, whatever it is made of.

`Tier` is what operators and clients see of every tier. `BackingTier` keeps versions of slabs, and `DurableTier` is
the one among the backing tiers that a restart finds again. The host tier is no backing tier, because clients and
kernels work in its memory: versions pass through it on their way. A new tier is a class in a file beside this one that
fulfils `BackingTier`; `storage/assembly.py` makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from storage.shard import TierName
from storage.tiers.base import TierCounters
from storage.tiers.extents import Extent
from storage.tiers.health import Device
from storage.tiers.io_engine import Priority

RegionT = TypeVar("RegionT")
RegionT_co = TypeVar("RegionT_co", covariant=True)


class Tier(Protocol):
    """What every tier tells operators and clients of itself; the engine lists its tiers in `Engine.tiers`."""

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
        """What the tier is made of, in words for operators."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """What makes the tier degraded apart from stuck devices, for operators; empty: nothing. May name jobs."""
        ...

    @property
    def bandwidth(self) -> float | None:
        """The measured bytes per second of the tier's devices; None for a tier that measures none."""
        ...

    async def close(self) -> None:
        """Wait for what is under way, and release files and memory."""
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
        """Bytes in whole pages."""
        ...

    @property
    def holders(self) -> int:
        """How often the region must be freed until its bytes may be used for another one; 0: they may be already."""
        ...

    @property
    def doubtful(self) -> bool:
        """Whether a sync that covered the bytes has failed, so that they must be written again elsewhere."""
        ...

    def verify(self, offset: int, buffer: memoryview) -> None:
        """Check whole blocks that `read_raw` has read from byte `offset` on; callable on any thread.

        Raises:
            DamagedBlockError: they are not what was written.
        """
        ...

    def record(self, offset: int, buffer: memoryview) -> None:
        """Note what `verify` will need of whole blocks that `write_raw` is going to write; callable on any thread."""
        ...


class Transfer(NamedTuple, Generic[RegionT_co]):
    """`buffer`, whole blocks (or up to the end) at byte `offset` of the region, page-aligned host memory."""

    region: RegionT_co
    offset: int
    buffer: memoryview


class BackingTier(Tier, Protocol[RegionT]):
    """A tier that keeps versions of slabs, each in a region of its own, which is never overwritten once it is complete.

    The engine moves bytes between host memory and backing tiers. `RegionT` is the tier's own class of regions; a tier
    is only ever given regions that it has allocated. A tier knows nothing of shards or jobs. All methods are called on
    the event loop's thread, and a tier does its blocking work elsewhere.
    """

    @property
    def is_durable(self) -> bool:
        """Whether the bytes survive the daemon and a power loss once they are synced.

        True for the one tier of an engine that fulfils `DurableTier`. The catalog names no version on any other tier:
        a snapshot copies such a version to the durable tier, and without a snapshot a restart loses it.
        """
        ...

    @property
    def devices(self) -> Sequence[Device]:
        """What transfers of the tier wait for; the engine watches them, and tells clients when one is stuck."""
        ...

    @property
    def new_regions(self) -> Collection[RegionT]:
        """Regions that are being filled by a `new_version` block, and belong to no slab yet."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Make sure that `nbytes` more can be allocated, now rather than in the middle of a step.

        Raises:
            BudgetExceededError: they cannot; the message names the budget.
        """
        ...

    def new_version(self, nbytes: int, label: str) -> AbstractAsyncContextManager[RegionT]:
        """Allocate a region for a block that fills it and gives it to a slab.

        A block that fails, or is cancelled, frees the region:

            async with tier.new_version(slab.nbytes, slab.label(step)) as region:
                await tier.write_from(region, 0, view)
                slab.add_version(step, region)

        Raises:
            BudgetExceededError: there is no room for it.
        """
        ...

    def hold(self, *regions: RegionT) -> None:
        """Keep the bytes of all regions until `free` was called once more for each.

        Raises:
            NotFoundError: all holders of a region have freed it. No region is held then.
        """
        ...

    def free(self, region: RegionT) -> None:
        """Release a region, whose bytes may be used for others when its last holder has freed it."""
        ...

    async def read_into(
        self, region: RegionT, offset: int, buffer: memoryview, priority: Priority = Priority.DEMAND
    ) -> None:
        """Fill `buffer` with whole blocks of the region from byte `offset` on, verified; see `read_many`."""
        ...

    async def write_from(
        self, region: RegionT, offset: int, buffer: memoryview, priority: Priority = Priority.UPDATE
    ) -> None:
        """Write `buffer`, whole blocks, into the region from byte `offset` on, and record it (see `Region.record`)."""
        ...

    async def read_many(self, transfers: Sequence[Transfer[RegionT]], priority: Priority) -> None:
        """Fill the buffers of all transfers, verified. The regions are held meanwhile.

        Raises:
            DamagedBlockError: a block is not what was written, also when it is read again.
            DeviceError: they cannot be read.
        """
        ...

    async def read_raw(self, transfers: Sequence[Transfer[RegionT]], priority: Priority) -> None:
        """Fill the buffers, which the caller verifies (see `Region.verify`) before it uses a byte of them.

        The caller asks `read_many` for the blocks that it finds wrong. Otherwise this does as `read_many`.
        """
        ...

    async def write_raw(self, transfers: Sequence[Transfer[RegionT]], priority: Priority) -> None:
        """Write the buffers of all transfers, which the caller has recorded. The regions are held meanwhile."""
        ...


class DurableTier(BackingTier[RegionT], Protocol[RegionT]):
    """The backing tier whose regions the catalog names: they are extents of data files, with checksums."""

    @property
    def damaged_blocks(self) -> int:
        """Blocks that were found damaged since the start."""
        ...

    async def sync(self) -> None:
        """Return when the devices have everything that was written before.

        Raises:
            DeviceError: they may not. What was written since the last sync stays doubtful.
        """
        ...

    def stored(self, region: RegionT) -> tuple[tuple[Extent, ...], bytes]:
        """Return the region's extents and checksums, for the catalog; callable on any thread."""
        ...

    def restored(self, extents: tuple[Extent, ...], checksums: bytes, label: str, nbytes: int) -> RegionT:
        """Return the region that the catalog knows by the extents and checksums that `stored` gave."""
        ...

    def damaged_bytes(self, regions: Iterable[RegionT]) -> int:
        """Return the bytes that were found damaged, are never used again, and are part of none of `regions`."""
        ...
