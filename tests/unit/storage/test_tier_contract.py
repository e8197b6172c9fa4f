"""The contract that every tier fulfils. A new tier is added here, and mypy checks that its class fits the protocol."""

from __future__ import annotations

import mmap
import random
from pathlib import Path
from typing import Any

import pytest

from storage.base.errors import BudgetExceededError, NotFoundError
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import TierName
from storage.base.tracing import Tracer
from storage.memory.host_cache import EvictionOrder
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import BackingTier, DurableTier, Move, Region, Tier
from storage.tiers.data_file import DataFile
from storage.tiers.health import DeviceWatch
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority
from storage.tiers.nvme import NvmeRegion, NvmeTier
from tests.unit.storage.folder_tier import FolderRegion, FolderTier
from tests.unit.storage.memory_copies import MemoryCopies

BUDGET = 64 * BLOCK_BYTES


def host_tier(_: Path) -> Tier:
    return HostTier(BUDGET, EvictionOrder(), lambda: None)


def nvme_tier(directory: Path) -> DurableTier[NvmeRegion]:
    file = DataFile(0, directory / "data", (), read_threads=2, write_threads=2)
    return NvmeTier([file], BUDGET, (), tracer=Tracer(), on_damage=lambda _error, _extents: None, on_freed=())


def folder_tier(directory: Path) -> BackingTier[FolderRegion]:
    return FolderTier(directory / "folder", BUDGET)


def page_aligned(data: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(data)))
    view[:] = data
    return view


@pytest.mark.parametrize("make", [host_tier, nvme_tier, folder_tier])
async def test_regions_keep_their_bytes_and_the_budget_is_kept(tmp_path: Path, make: Any) -> None:
    tier = make(tmp_path)
    rng = random.Random(1)
    try:
        empty = tier.used_bytes
        regions = [await tier.allocate(4 * BLOCK_BYTES) for _ in range(3)]
        assert tier.used_bytes == empty + 3 * 4 * BLOCK_BYTES <= tier.budget_bytes
        written = [rng.randbytes(4 * BLOCK_BYTES) for _ in regions]
        for region, data in zip(regions, written, strict=True):
            await tier.write_from(region, 0, page_aligned(data))
        for region, data in zip(regions, written, strict=True):
            part = page_aligned(bytes(2 * BLOCK_BYTES))
            await tier.read_into(region, BLOCK_BYTES, part)
            assert part == data[BLOCK_BYTES : 3 * BLOCK_BYTES]
        with pytest.raises(BudgetExceededError, match=f"{tier.name.value}_budget"):
            await tier.allocate(BUDGET + 1)
        for region in regions:
            tier.free(region)
        assert tier.used_bytes == empty and tier.queue_depth == 0
    finally:
        await tier.close()


@pytest.mark.parametrize("make", [nvme_tier, folder_tier])
async def test_a_version_is_held_until_its_last_holder_has_freed_it(tmp_path: Path, make: Any) -> None:
    tier: BackingTier[Any] = make(tmp_path)
    try:
        with pytest.raises(RuntimeError, match="refused"):
            async with tier.new_version(BLOCK_BYTES, "label"):
                assert len(tier.new_regions) == 1
                raise RuntimeError("refused")
        assert tier.used_bytes == 0 and not tier.new_regions
        async with tier.new_version(BLOCK_BYTES, "label") as region:
            pass
        assert region.tier is tier and (region.label, region.nbytes) == ("label", BLOCK_BYTES)
        tier.hold(region)
        tier.free(region)
        assert tier.used_bytes == BLOCK_BYTES
        tier.free(region)
        assert tier.used_bytes == 0 and not region.holders
        with pytest.raises(NotFoundError):
            tier.hold(region)
        with pytest.raises(BudgetExceededError, match=f"{tier.name.value}_budget"):
            tier.reserve(BUDGET + 1)
    finally:
        await tier.close()


async def test_moves_of_several_tiers_are_made_by_the_tier_of_each(tmp_path: Path) -> None:
    nvme, folder = nvme_tier(tmp_path), FolderTier(tmp_path / "folder", BUDGET)
    backing = BackingTiers([folder], nvme, DeviceWatch(30))
    try:
        assert [tier.name for tier in backing] == ["gpu", "nvme"]
        regions: list[Region] = []
        for name in (TierName.GPU, TierName.NVME, TierName.GPU):
            async with backing.new_version(name, BLOCK_BYTES, "label") as region:
                regions.append(region)
        written = [page_aligned(random.Random(n).randbytes(BLOCK_BYTES)) for n in range(3)]
        for region, data in zip(regions, written, strict=True):
            region.record(0, data)
        writes = [Move(region, 0, data) for region, data in zip(regions, written, strict=True)]
        await backing.write_raw(writes, Priority.UPDATE)
        read = [page_aligned(bytes(BLOCK_BYTES)) for _ in range(3)]
        reads = [Move(region, 0, buffer) for region, buffer in zip(regions, read, strict=True)]
        await backing.read_many(reads, Priority.DEMAND)
        assert read == written
        assert (folder.counters.bytes_read, nvme.counters.bytes_read) == (2 * BLOCK_BYTES, BLOCK_BYTES)
        copy = await backing.copy_to_durable(regions[0])
        await backing.read_into(copy, 0, read[1])
        assert read[1] == written[0]
    finally:
        await backing.close()


async def test_a_tier_that_cannot_take_part_is_refused(tmp_path: Path) -> None:
    nvme, folder, watch = nvme_tier(tmp_path), FolderTier(tmp_path / "folder", BUDGET), DeviceWatch(30)
    try:
        with pytest.raises(ValueError, match="a name of its own"):
            BackingTiers([folder, folder], nvme, watch)
        with pytest.raises(ValueError, match="a name of its own"):
            BackingTiers([folder], nvme, watch, [MemoryCopies(BUDGET)])
        folder.is_durable = True
        with pytest.raises(ValueError, match="no other one"):
            BackingTiers([folder], nvme, watch)
    finally:
        await watch.close()
        await nvme.close()
