"""Many ranges that are read into one buffer: what is read in place, what is copied, and that the bytes are right."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

import storage.base.slices
import storage.steps.reader
from storage.base.errors import DataLossError
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.engine import Engine
from storage.memory.gathering import Gathering, InPlace, TensorRange
from storage.state.versions import Job
from storage.steps.reader import StepReader
from storage.tiers.nvme import NvmeRegion
from tests.unit.storage.builders import MIB, opened

BLOCK = BLOCK_BYTES // 4
# The elements of each tensor. "a" to "d" lie one behind the other in the group "unit"; "e" has a group of its own. All
# sizes are multiples of the 16 bytes to which a gathering aligns its ranges, so that its buffer has no gaps. Only the
# size of "e" is a multiple of a page, so that a tensor behind "e" in a buffer begins at a page.
SIZES = {"a": 48, "b": 2 * BLOCK + 16, "c": 16, "d": BLOCK, "e": 3 * BLOCK}

ROOM = {"host_budget_bytes": 32 * MIB, "nvme_budget_bytes": 64 * MIB}


async def commit(engine: Engine, placement: TierName) -> Job:
    """Commit a step with all tensors."""
    parameters = tuple(
        ParameterSpec(fqn=fqn, shape=(n,), dtype=DType.FLOAT32, trainable=False) for fqn, n in SIZES.items()
    )
    job = await engine.open_job(
        JobSpec(name="job", world_size=1, local_ranks=1, parameters=parameters, durability=Durability(every_steps=1)),
        may_exist=True,
        must_exist=False,
    )
    slabs = (SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=placement),)
    groups = []
    for name, fqns in (("unit", "abcd"), ("own", "e")):
        starts = [0, *itertools.accumulate(SIZES[fqn] for fqn in fqns)]
        shards = [
            Shard(fqn=fqn, offset=0, numel=SIZES[fqn], group_offset=start)
            for fqn, start in zip(fqns, starts, strict=False)
        ]
        groups.append(GroupSpec(name=name, numel=starts[-1], shards=tuple(shards), slabs=slabs))
    await engine.register(job, groups)
    for group in groups:
        pin = await engine.pins.stage(job, group.name, Kind.PARAM)
        engine.host.tensor(pin.arena_range, DType.FLOAT32, group.numel)[:] = torch.cat(
            [values(shard.fqn) for shard in group.shards]
        )
        await engine.pins.publish(pin)
    await engine.commit(job, 0, {}, 0)
    return job


def values(fqn: str) -> torch.Tensor:
    return torch.rand(SIZES[fqn], generator=torch.Generator().manual_seed(ord(fqn)))


async def gathered(engine: Engine, job: Job, reader: StepReader, names: str) -> list[InPlace]:
    """Check that the tensors are read as one buffer has them, and return what was read in place."""
    gathering = await Gathering.of(job, [TensorRange(fqn, Kind.PARAM, 0, SIZES[fqn]) for fqn in names])
    range_ = await engine.step_readers.load(job, gathering.nbytes, lambda view: reader.gather(gathering, view))
    stored = engine.host.tensor(range_, DType.FLOAT32, gathering.nbytes // 4)
    # All sizes are multiples of 16 bytes, so that one tensor follows the other without a gap.
    assert torch.equal(stored, torch.cat([values(fqn) for fqn in names]))
    engine.scratch.free(range_)
    return gathering.in_place


@pytest.mark.parametrize("is_restarted", [False, True], ids=["copies in host memory", "restarted"])
@pytest.mark.parametrize("placement", [TierName.NVME, TierName.HOST])
async def test_tensors_that_lie_together_are_read_in_place_as_one(
    tmp_path: Path, placement: TierName, is_restarted: bool
) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(opened(tmp_path, **ROOM))
        job = await commit(engine, placement)
        if is_restarted:
            await stack.aclose()
            engine = await stack.enter_async_context(opened(tmp_path, **ROOM))
            job = engine.jobs.job("job")
        reader = await engine.step_readers.open(job)
        (whole,) = await gathered(engine, job, reader, "abcd")
        assert (whole.start, whole.at, whole.nbytes) == (0, 0, 3 * BLOCK_BYTES)
        own, unit = await gathered(engine, job, reader, "eabcd")
        assert (own.at, own.nbytes) == (0, 3 * BLOCK_BYTES) and (unit.at, unit.start) == (3 * BLOCK_BYTES, 0)
        # Behind "a", the first byte of "e" is not that of a page, and "b" begins within a block.
        for names in ("ae", "ba", "dcbad"):
            assert await gathered(engine, job, reader, names) == []
        reader.close()


async def test_other_tasks_go_on_while_a_large_copy_is_read_and_cannot_evict_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **ROOM) as engine:
        job = await commit(engine, TierName.NVME)
        slab, reader = job.slab("own", Kind.PARAM), await engine.step_readers.open(job)
        engine.pins.unpin(await engine.pins.fetch(job, "own", Kind.PARAM), 7.0)
        monkeypatch.setattr(storage.steps.reader, "COPIED_AT_ONCE", BLOCK_BYTES // 4)
        # Each item of a walk is a slice of its own.
        monkeypatch.setattr(storage.base.slices, "SLICE_SECONDS", -1.0)
        evictions: list[bool] = []

        async def evict() -> None:
            while True:
                if slab.copy is not None and slab.copy.pins:
                    evictions.append(engine.host_cache.evict(slab))
                await asyncio.sleep(0)

        evicting = asyncio.ensure_future(evict())
        assert len(await gathered(engine, job, reader, "e")) == 1
        evicting.cancel()
        assert len(evictions) >= 11 and not any(evictions)
        assert slab.copy is not None and slab.copy.next_use == 7.0
        assert engine.host_cache.evict(slab)
        reader.close()


async def test_damage_is_found_in_bytes_that_are_read_in_place(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM) as engine:
        await commit(engine, TierName.NVME)
    async with opened(tmp_path, **ROOM) as engine:
        job = engine.jobs.job("job")
        reader = await engine.step_readers.open(job)
        region = reader.regions[job.slab("own", Kind.PARAM)]
        assert isinstance(region, NvmeRegion)
        (extent,) = region.extents
        with engine.nvme.files[extent.file].path.open("r+b") as file:
            file.seek(extent.offset + BLOCK_BYTES + 5)
            file.write(b"?")
        used = engine.host.used_bytes
        with pytest.raises(DataLossError, match="own"):
            await gathered(engine, job, reader, "e")
        assert engine.host.used_bytes == used
        reader.close()
