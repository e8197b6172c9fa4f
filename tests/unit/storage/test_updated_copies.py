"""After its update a parameter stays in host memory for its next use, if copies needed sooner leave room for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from storage.engine import Engine
from storage.shard import DType, Kind
from storage.slab import Slab
from tests.unit.storage.builders import Layout, Training, opened, room_taken

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
            engine.unpin(await engine.fetch(training.job, group, Kind.PARAM))
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
        engine.unpin(await engine.fetch(training.job, other.key.group, Kind.PARAM), next_use=needed_at)
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
