"""After its update a slab stays in host memory for its next use, if copies that are needed sooner leave room for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from storage.base.shard import DType, Kind
from storage.engine import Engine
from storage.state.slab import Slab
from tests.unit.storage.builders import MIB, Layout, Training, late_reads, opened, room_taken, updating

PRECISIONS = [DType.BFLOAT16, DType.FLOAT32]
POSITION = 2.0


async def without_copies(engine: Engine, precision: DType) -> Training:
    """Return a job after its first step, with nothing in host memory."""
    training = await Training(engine, Layout(precision=precision)).begin()
    await training.step()
    for slab in training.job.slabs():
        engine.host_cache.free_copy(slab)
    return training


def parameters(training: Training) -> list[Slab]:
    return [training.job.slab(group, Kind.PARAM) for group in training.layout.groups]


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_in_free_room_and_the_next_fetch_reads_nothing(tmp_path: Path, precision: DType) -> None:
    async with opened(tmp_path) as engine:
        training = await without_copies(engine, precision)
        await training.step()
        assert all(slab.current_copy is not None for slab in parameters(training))
        before = engine.nvme.counters.bytes_read
        for group in training.layout.groups:
            engine.pins.unpin(await engine.pins.fetch(training.job, group, Kind.PARAM))
        assert engine.nvme.counters.bytes_read == before
        await training.assert_at(2)
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
        await training.assert_at(2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("needed_at", "displaced"), [(POSITION + 1, True), (POSITION - 1, False)])
async def test_in_the_room_of_what_is_needed_later_only(
    tmp_path: Path, precision: DType, needed_at: float, displaced: bool
) -> None:
    async with opened(tmp_path) as engine:
        training = await without_copies(engine, precision)
        updated, other = parameters(training)
        engine.pins.unpin(await engine.pins.fetch(training.job, other.key.group, Kind.PARAM), next_use=needed_at)
        step = training.job.next_step
        await training.hand_over([updated.key.group], position=POSITION)
        with room_taken(engine):
            await asyncio.gather(*training.job.open_pending(step).writes.values())
            assert (other.copy is None, updated.copy is not None) == (displaced, displaced)
        await training.hand_over([other.key.group])
        await training.commit(step)
        await training.assert_at(2)


async def test_not_after_an_update_that_failed(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise ValueError("a kernel's mistake")

    async with opened(tmp_path) as engine:
        training = await without_copies(engine, DType.BFLOAT16)
        await training.hand_over(wrap=lambda _: fail)
        with pytest.raises(ValueError, match="a kernel's mistake"):
            await training.commit(2)
        await engine.roll_back(training.job, 1)
        assert [slab for slab in training.job.slabs() if slab.copy is not None] == []
        await training.assert_at(1)


async def test_a_fetch_that_was_queued_before_the_update_leaves_no_copy_of_the_old_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update has taken a copy to work on when the fetch gets its turn, and is over after it."""
    async with opened(tmp_path) as engine:
        training = await without_copies(engine, DType.FLOAT32)
        updated, other = parameters(training)
        # One fetch is under way at a time.
        monkeypatch.setattr(engine.queue, "_in_flight_budget", 1)
        wants = [(slab.key.group, Kind.PARAM, number) for number, slab in enumerate((other, updated))]
        with late_reads(engine) as may_end:
            engine.pins.prefetch("rank", training.job, wants)
            async with updating(training, [updated.key.group]):
                worked_on = updated.copy
                may_end.set()
                async with asyncio.timeout(10):
                    while updated.copy is worked_on or updated.current_copy is None:
                        await asyncio.sleep(0.001)
        await training.hand_over([other.key.group])
        await training.commit(2)
        assert updated.copy is updated.current_copy
        await training.assert_at(2)


async def test_states_that_have_room_in_host_memory_are_not_read_again(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=16 * MIB) as engine:
        training = await Training(engine, Layout(groups=("a", "b", "c"))).begin()
        await training.step()
        read = engine.nvme.counters.bytes_read
        await training.step()
        await training.step()
        assert engine.nvme.counters.bytes_read == read
        await training.assert_at(3)


async def test_states_never_take_the_room_of_what_is_needed_sooner(tmp_path: Path) -> None:
    """There is room for a part of the states. The same part stays in memory, and the rest passes through tiles."""
    layout = Layout(groups=tuple("abcdefgh"))
    async with opened(tmp_path) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        kept = {slab.key for slab in training.job.slabs() if slab.copy is not None}
        assert 0 < len(kept) < len(list(training.job.slabs()))
        for step in (2, 3):
            await training.step()
            await training.assert_at(step)
