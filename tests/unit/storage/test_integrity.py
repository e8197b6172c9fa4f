"""Damage on NVMe is detected, named and never returned: flipped bits, swapped and stale blocks, bad checksums."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from storage.engine import Engine
from storage.errors import DataLossError
from storage.integrity import BLOCK_BYTES, Checksums
from storage.shard import DType, Kind
from storage.slab import Slab
from storage.tiers.base import PAGE_BYTES
from tests.unit.storage.builders import Layout, Training, opened

FLIPS = 300
LAYOUT = Layout(precision=DType.BFLOAT16)


def pages(slab: Slab) -> list[int]:
    """Where the pages of the newest version are in the data file."""
    assert slab.latest is not None
    extents = slab.versions[slab.latest].extents
    return [offset for e in extents for offset in range(e.offset, e.offset + e.nbytes, PAGE_BYTES)]


async def is_damaged(engine: Engine, training: Training, slab: Slab) -> bool:
    """Reads a slab anew, whole and by an update's tiles' way; the error must name it."""
    engine.residents.detach(slab)
    try:
        pin = await engine.fetch(training.job, slab.key.group, slab.key.kind)
    except DataLossError as error:
        assert f"{slab.key} at step" in str(error)
        return True
    engine.unpin(pin)
    return False


async def test_every_flipped_bit_is_found_and_its_shard_is_named(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        slabs = list(training.job.slabs())
        with engine.nvme.files[0].path.open("r+b") as file:
            for _ in range(FLIPS):
                slab = rng.choice(slabs)
                position = rng.choice(pages(slab)) + rng.randrange(PAGE_BYTES)
                file.seek(position)
                good = file.read(1)
                for value in (bytes([good[0] ^ (1 << rng.randrange(8))]), good):
                    file.seek(position)
                    file.write(value)
                    file.flush()
                    assert await is_damaged(engine, training, slab) == (value != good)
        await training.assert_at(1)


async def test_good_bytes_at_a_wrong_place_or_of_another_version_are_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        moments = [slab for slab in training.job.slabs() if slab.key.kind is Kind.EXP_AVG]
        old = {slab: engine.nvme.files[0].path.read_bytes()[pages(slab)[0] :][:PAGE_BYTES] for slab in moments}
        await training.step()
        first, second = (pages(slab)[0] for slab in moments)
        with engine.nvme.files[0].path.open("r+b") as file:
            for position, content in ((first, old[moments[0]]), (first, old[moments[1]])):
                good = engine.nvme.files[0].path.read_bytes()[position:][:PAGE_BYTES]
                for value in (content, good):
                    file.seek(position)
                    file.write(value)
                    file.flush()
                    assert await is_damaged(engine, training, moments[0]) == (value != good)
            assert second != first
        await training.assert_at(2)


async def test_an_update_never_uses_damaged_states(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        slab = next(slab for slab in training.job.slabs() if slab.key.kind is Kind.MASTER)
        engine.residents.detach(slab)
        with engine.nvme.files[0].path.open("r+b") as file:
            file.seek(pages(slab)[-1])
            page = file.read(PAGE_BYTES)
            file.seek(pages(slab)[-1])
            file.write(bytes(PAGE_BYTES))
            file.flush()
            with pytest.raises(DataLossError, match="at step 1"):
                await training.step()
            await engine.roll_back(training.job, 1)
            file.seek(pages(slab)[-1])
            file.write(page)
        await training.assert_at(1)


async def test_a_damaged_checksum_in_the_catalog_is_found_after_reopening(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db, db:
        db.execute("UPDATE versions SET checksums = zeroblob(length(checksums)) WHERE slab = 1")
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUT).open()
        damaged = [slab for slab in training.job.slabs() if await is_damaged(engine, training, slab)]
        assert len(damaged) == 1


def test_checksums_that_do_not_fit_their_region_are_data_loss() -> None:
    with pytest.raises(DataLossError, match="1 checksums for the 32768 bytes of a slab"):
        Checksums("a slab", 2 * BLOCK_BYTES, bytes(8))


def test_parts_of_blocks_cannot_be_verified() -> None:
    checksums = Checksums("a slab", 2 * BLOCK_BYTES + PAGE_BYTES)
    checksums.record(0, memoryview(bytes(2 * BLOCK_BYTES + PAGE_BYTES)))
    checksums.verify(2 * BLOCK_BYTES, memoryview(bytes(PAGE_BYTES)))
    for offset, length in ((0, PAGE_BYTES), (PAGE_BYTES, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES)):
        with pytest.raises(ValueError, match="not whole blocks"):
            checksums.verify(offset, memoryview(bytes(length)))
