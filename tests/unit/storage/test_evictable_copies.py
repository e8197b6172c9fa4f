"""While an update waits for one that is needed sooner, the memory of its copies can be used by others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from storage.base.codec import TILE_QUANTUM
from storage.base.shard import DType, TierName
from storage.engine import Engine
from storage.state.slab import Slab
from storage.steps.tile import Kernel
from tests.unit.storage.builders import MIB, Layout, Training, held_up, opened, room_taken, waiting_for

# A group has nine tiles, and an engine with these budgets has memory for four at a time.
NUMELS = (500_003, 17, 80_000)
BUDGETS = {"host_budget_bytes": 27 * MIB, "nvme_budget_bytes": 128 * MIB}
FIFTH_TILE = 4 * TILE_QUANTUM
LATER, SOONER = "block.0", "block.1"

IN_EACH_PRECISION = pytest.mark.parametrize("precision", [DType.FLOAT32, DType.BFLOAT16])
WITH_AND_WITHOUT_COPIES = pytest.mark.parametrize("in_memory", [True, False])


@asynccontextmanager
async def one_waits_for_the_other(training: Training) -> AsyncIterator[None]:
    """Hold the update of LATER in the middle of its tiles during the block, because SOONER's update has the lock."""

    def waiting_for_fifth(kernel: Kernel) -> Kernel:
        # Tiles wait from the fifth on, because the same thread must first compute the tiles of LATER that have begun.
        waiting = waiting_for(sooner_begun, sooner_goes_on, kernel)
        return lambda tile: (waiting if tile.start >= FIFTH_TILE else kernel)(tile)

    with held_up() as (later_begun, later_goes_on), held_up() as (sooner_begun, sooner_goes_on):
        await training.hand_over([LATER], partial(waiting_for, later_begun, later_goes_on), position=9)
        await asyncio.to_thread(later_begun.wait)
        await training.hand_over([SOONER], waiting_for_fifth, position=1)
        later_goes_on.set()
        await asyncio.to_thread(sooner_begun.wait)
        while any(slab.copy and slab.copy.pins for slab in slabs_of(training, LATER) if not slab.at_home_in_host):
            await asyncio.sleep(0)
        yield
        sooner_goes_on.set()


async def begun(engine: Engine, precision: DType, *, in_memory: bool, moments: TierName = TierName.NVME) -> Training:
    """Return a job after its first step, with all its states in host memory or none."""
    layout = Layout(numels=NUMELS, precision=precision, moments=moments)
    training = await Training(engine, layout).begin()
    await training.step()
    assert all(slab.current_copy is not None for slab in training.job.slabs())
    if not in_memory:
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
    return training


def slabs_of(training: Training, group: str) -> tuple[Slab, ...]:
    return training.job.group(group).slabs


@IN_EACH_PRECISION
@WITH_AND_WITHOUT_COPIES
async def test_their_room_can_be_had_and_the_update_is_right_without_them(
    tmp_path: Path, precision: DType, in_memory: bool
) -> None:
    async with opened(tmp_path, **BUDGETS) as engine:
        training = await begun(engine, precision, in_memory=in_memory)
        async with one_waits_for_the_other(training):
            with room_taken(engine, -math.inf):
                assert all(slab.copy is None for slab in slabs_of(training, LATER))
                assert all(slab.copy is not None for slab in slabs_of(training, SOONER)), "it is being updated"
        await training.commit(2)
        await training.assert_goes_on_from(2)


@IN_EACH_PRECISION
@WITH_AND_WITHOUT_COPIES
async def test_what_nobody_took_stays_in_memory(tmp_path: Path, precision: DType, in_memory: bool) -> None:
    async with opened(tmp_path, **BUDGETS) as engine:
        training = await begun(engine, precision, in_memory=in_memory)
        async with one_waits_for_the_other(training):
            assert engine.host_cache.evictable_bytes > 0
        await training.commit(2)
        assert all(slab.current_copy is not None for slab in training.job.slabs())
        read = engine.nvme.counters.bytes_read
        await training.assert_at(2)
        assert engine.nvme.counters.bytes_read == read
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
        await training.assert_at(2)


async def test_what_is_at_home_in_memory_is_not_evictable(tmp_path: Path) -> None:
    async with opened(tmp_path, **BUDGETS) as engine:
        training = await begun(engine, DType.BFLOAT16, in_memory=True, moments=TierName.HOST)
        at_home = [slab for slab in slabs_of(training, LATER) if slab.at_home_in_host]
        async with one_waits_for_the_other(training):
            with room_taken(engine, -math.inf):
                assert at_home and all(slab.copy is not None for slab in at_home)
        await training.commit(2)
        await training.assert_at(2)


@pytest.mark.parametrize("taken", [True, False])
async def test_a_waiting_update_is_withdrawn(tmp_path: Path, taken: bool) -> None:
    async with opened(tmp_path, **BUDGETS) as engine:
        training = await begun(engine, DType.BFLOAT16, in_memory=True)
        async with one_waits_for_the_other(training):
            if taken:
                with room_taken(engine, -math.inf):
                    pass
            await engine.pending_steps.withdraw(training.job, 2, LATER)
            assert all(slab.copy is None for slab in slabs_of(training, LATER)), "a part of it was updated"
        await training.hand_over([LATER])
        await training.commit(2)
        await training.assert_at(2)
