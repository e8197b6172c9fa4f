"""The contract that every tier fulfils. A new tier is added here, and mypy checks that its class fits the protocol."""

from __future__ import annotations

import mmap
import random
from pathlib import Path
from typing import Any

import pytest

from storage.errors import BudgetExceededError
from storage.integrity import BLOCK_BYTES
from storage.tiers.arena import ArenaRange
from storage.tiers.base import Tier
from storage.tiers.data_file import DataFile
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeRegion, NvmeTier

BUDGET = 64 * BLOCK_BYTES


def host_tier(_: Path) -> Tier[ArenaRange]:
    return HostTier(BUDGET)


def nvme_tier(directory: Path) -> Tier[NvmeRegion]:
    file = DataFile(0, directory / "data", (), read_threads=2, write_threads=2)
    return NvmeTier([file], BUDGET, (), stuck_after_seconds=30)


def page_aligned(data: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(data)))
    view[:] = data
    return view


@pytest.mark.parametrize("make", [host_tier, nvme_tier])
async def test_regions_keep_their_bytes_and_the_budget_is_kept(tmp_path: Path, make: Any) -> None:
    tier: Tier[Any] = make(tmp_path)
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
