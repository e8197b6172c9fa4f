"""Background verification finds and names damage that no other read has found, and its blocks are not used again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from storage.base.errors import DamagedBlockError
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import Kind
from storage.base.tracing import Activity, Span
from storage.jobs.upkeep import versions_on
from storage.steps.scrub import LEAST_CHARGED_BYTES
from tests.unit.storage.builders import ROOM_FOR_TILED, Layout, Training, on_nvme, opened, quiesce

# Slabs have whole blocks, so that all other space can be allocated after a bad block is set aside.
LAYOUT = Layout(numels=(120_003, 17, 43_792))
FAST = 1 << 30


async def a_pass(training: Training) -> None:
    """Wait until a pass that began after this call has ended."""
    scrubber = training.engine.scrubber
    passes = scrubber.passes
    while scrubber.passes < passes + 2:
        await asyncio.sleep(0.01)


async def test_it_reads_everything_and_finds_nothing_wrong_where_nothing_is(tmp_path: Path) -> None:
    async with opened(tmp_path, scrub_bytes_per_second=FAST, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        await a_pass(training)
        assert engine.scrubber.bytes_read >= training.version_bytes
        assert engine.nvme.problems == [] and engine.nvme.damaged_blocks == 0


async def test_its_reads_have_spans_of_their_own(tmp_path: Path) -> None:
    async with opened(tmp_path, scrub_bytes_per_second=FAST, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        spans: list[Span] = []
        engine.tracer.listen(spans.append)
        await a_pass(training)
        assert {span.activity for span in spans} == {Activity.SCRUB}
        assert sum(span.nbytes for span in spans) >= training.version_bytes


async def test_versions_can_be_walked_while_jobs_come_and_go(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        first = await Training(engine, replace(LAYOUT, name="first")).begin()
        second = await Training(engine, replace(LAYOUT, name="second")).begin()
        await first.step()
        expected = {
            region for job in (first.job, second.job) for slab in job.slabs() for region in slab.versions.values()
        }

        assert set(versions_on(engine.nvme, [first.job, second.job])) == expected
        walk = versions_on(engine.nvme, [first.job, second.job])
        seen = {next(walk)}
        await first.step()
        await quiesce(engine)
        await engine.delete_job("second")
        seen |= set(walk)
        assert {region.label.partition("/")[0] for region in seen} == {"first"}


async def test_it_keeps_to_its_bandwidth(tmp_path: Path) -> None:
    began, rate = time.monotonic(), 1 << 20
    async with opened(tmp_path, scrub_bytes_per_second=rate, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUT).begin()
        # The scrubber reads a slab, and then waits for as long as the rate asks for.
        largest = max(slab.nbytes for slab in training.job.slabs())
        async with asyncio.timeout(60):
            while engine.scrubber.bytes_read <= largest:
                await training.step()
                nbytes = engine.scrubber.bytes_read
                assert nbytes <= largest + rate * (time.monotonic() - began)


async def test_a_small_read_counts_as_a_longer_one(tmp_path: Path) -> None:
    """A store of many small tensors must not take a CPU to be read at its bandwidth."""
    began, rate = time.monotonic(), 8 << 20
    small = replace(LAYOUT, numels=(1_024,) * 8)
    async with opened(tmp_path, scrub_bytes_per_second=rate, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, small).begin()
        largest = max(slab.nbytes for slab in training.job.slabs())
        assert largest < LEAST_CHARGED_BYTES
        async with asyncio.timeout(60):
            while engine.scrubber.bytes_read < 16 * largest:
                await training.step()
                reads = engine.scrubber.bytes_read / largest
                assert reads <= 1 + rate * (time.monotonic() - began) / LEAST_CHARGED_BYTES


async def test_damage_is_named_and_its_blocks_are_set_aside_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, scrub_bytes_per_second=FAST, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        slab = training.job.slab("block.1", Kind.EXP_AVG)
        extent = on_nvme(slab.versions[1]).extents[0]
        with engine.nvme.files[0].path.open("r+b") as file:
            file.seek(extent.offset + 5000)
            file.write(b"damage")
        await a_pass(training)
        assert engine.nvme.problems == ["job/block.1/exp_avg at step 1 is damaged"]
        assert f"bytes 0 to {BLOCK_BYTES} (block.1.weight.0) on nvme are damaged" in caplog.text
        assert engine.nvme.bad_bytes == BLOCK_BYTES
        # Host memory still has a good copy, which is freed here.
        engine.host_cache.free_copy(slab)
        with pytest.raises(DamagedBlockError, match=r"block\.1\.weight\.0"):
            await training.step()
        await engine.roll_back(training.job, 1)
        await engine.delete_job("job")
        assert engine.nvme.problems == [] and engine.nvme.used_bytes == engine.nvme.bad_bytes
        region = await engine.nvme.allocate(engine.nvme.budget_bytes - engine.nvme.bad_bytes)
        bad = next(iter(engine.nvme.bad))
        assert all(e.end <= bad.offset or e.offset >= bad.end for e in region.extents)
        engine.nvme.free(region)
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        assert engine.nvme.bad_bytes == BLOCK_BYTES, "also after a restart"


async def test_a_version_that_is_smaller_than_a_block_is_verified_in_one_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(numels=(17,))).begin()
        region = on_nvme(training.job.slab("block.0", Kind.PARAM).versions[0])
        assert region.nbytes < BLOCK_BYTES
        assert [found async for found in engine.scrubber.verify(region)] == [(region.nbytes, None)]
