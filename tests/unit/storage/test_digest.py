"""The digest of a slab is that of its elements alone, as the device has them, whatever the store and the job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash

from storage.base.errors import DataLossError
from storage.base.shard import DType, Kind, TierName
from tests.unit.storage.builders import ROOM_FOR_TILED, Layout, Training, flip, on_nvme, opened

# The groups have more bytes than a buffer, and elements between their shards.
LAYOUTS = {
    "nvme": Layout(numels=(120_003, 17, 43_792), precision=DType.BFLOAT16),
    "memory": Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=0),
}


def expected(training: Training, step: int, group: str, kind: Kind) -> bytes:
    states = training.reference.states(step)
    digest = xxhash.xxh3_128()
    for shard in training.layout.group(group).shards:
        (state,) = [tensor for (_, fqn, of), tensor in states.items() if (fqn, of) == (shard.fqn, kind)]
        digest.update(state.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


@pytest.mark.parametrize("name", LAYOUTS)
async def test_it_is_that_of_torchs_bytes_at_a_readers_step_and_of_the_newest_bytes(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUTS[name]).begin()
        await training.step()
        reader = await engine.step_readers.open(training.job)
        await training.step()
        for group in training.layout.groups:
            for kind in training.layout.kinds:
                assert await reader.digest(group, kind) == (1, expected(training, 1, group, kind))
                assert await engine.reader.digest(training.job, group, kind) == (2, expected(training, 2, group, kind))
        reader.close()


async def test_what_was_never_written_has_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        layout = Layout()
        job = await engine.open_job(layout.job(), may_exist=True, must_exist=False)
        await engine.register(job, [layout.group(group) for group in layout.groups])
        assert await engine.reader.digest(job, layout.groups[0], Kind.EXP_AVG) == (None, b"")


async def test_it_is_computed_from_what_the_device_returns_and_not_from_a_copy(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        group = training.layout.groups[0]
        slab = training.job.slab(group, Kind.PARAM)
        assert slab.latest is not None
        pin = await engine.pins.fetch(training.job, group, Kind.PARAM)
        flip(engine, on_nvme(slab.versions[slab.latest]).extents[0].offset)
        with pytest.raises(DataLossError):
            await engine.reader.digest(training.job, group, Kind.PARAM)
        engine.pins.unpin(pin)
