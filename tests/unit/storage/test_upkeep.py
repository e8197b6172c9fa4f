"""Operators list the steps of a store, have its bytes verified, and move copies, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from storage.base.errors import ConflictError, DamagedBlockError, NotFoundError
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import Kind, TierName
from storage.engine import Engine
from storage.jobs.upkeep import HeldStep, Verified
from storage.steps.scrub import MOST_DAMAGED_BLOCKS
from storage.steps.tile import Kernel, UpdateTile
from tests.unit.storage.builders import MIB, ROOM_FOR_TILED, Layout, Training, on_nvme, opened

ROOMY = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 64 * MIB}
# A slab of several blocks.
TILED = Layout(numels=(120_003, 17, 43_792))
LARGE = Layout(numels=(400_000,), groups=("a",), with_skips=False)


async def verified(engine: Engine, name: str | None = None) -> list[Verified]:
    return [progress async for progress in engine.upkeep.verify(name)]


async def steps(engine: Engine, name: str = "job") -> dict[int, HeldStep]:
    return {step.record.step: step for step in await engine.upkeep.steps(name)}


async def test_a_verification_reads_every_version_once_and_finds_nothing_where_nothing_is(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, TILED).begin()
        await training.step()
        await training.step(settled=1)
        before = engine.nvme.counters.bytes_read
        progress = await verified(engine, "job")
        used = sum(region.nbytes for slab in training.job.slabs() for region in slab.versions.values())
        assert used == 2 * training.version_bytes == engine.nvme.used_bytes
        assert {one.total_bytes for one in progress} == {used} and progress[-1].verified_bytes == used
        assert engine.nvme.counters.bytes_read - before == used
        assert not any(one.damage for one in progress)
        assert [one.verified_bytes for one in await verified(engine)] == [one.verified_bytes for one in progress]
        with pytest.raises(NotFoundError, match="there is no job 'other'"):
            await verified(engine, "other")


async def test_each_damaged_block_is_reported_with_its_parameters_up_to_a_bound(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED | {"nvme_budget_bytes": 64 * MIB}) as engine:
        training = await Training(engine, LARGE).begin()
        await training.step()
        slab, other = (training.job.slab("a", kind) for kind in (Kind.EXP_AVG, Kind.PARAM))
        blocks = slab.paged_bytes // BLOCK_BYTES
        assert blocks > MOST_DAMAGED_BLOCKS
        with engine.nvme.files[0].path.open("r+b") as file:
            for number in range(blocks):
                file.seek(on_nvme(slab.versions[1]).extents[0].offset + number * BLOCK_BYTES + 5)
                file.write(b"damage")
            for number in (1, 3):
                file.seek(on_nvme(other.versions[1]).extents[0].offset + number * BLOCK_BYTES + 5)
                file.write(b"damage")
        progress = await verified(engine)
        assert progress[-1].verified_bytes == progress[-1].total_bytes
        found = [one.damage for one in progress if isinstance(one.damage, DamagedBlockError)]
        of_slab = [error.offset for error in found if error.label == slab.label(1)]
        assert of_slab == [number * BLOCK_BYTES for number in range(MOST_DAMAGED_BLOCKS)]
        assert [error.offset for error in found if error.label == other.label(1)] == [BLOCK_BYTES, 3 * BLOCK_BYTES]
        assert {error.fqns for error in found} == {("a.weight.0",)}
        assert len(found) == engine.nvme.damaged_blocks


def test_the_text_about_a_block_of_many_parameters_names_a_few_of_them() -> None:
    error = DamagedBlockError("job/a/param/step 1", 0, BLOCK_BYTES)
    error.fqns = tuple(f"layer.{number}.bias" for number in range(1000))
    assert f"(layer.0.bias, layer.1.bias, {', '.join(error.fqns[2:8])} and 992 more) on nvme are damaged" in str(error)
    error.fqns = error.fqns[:8]
    assert "layer.7.bias) on nvme" in str(error)


async def test_one_verification_runs_at_a_time_and_one_that_is_given_up_makes_room(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        await Training(engine, TILED).begin()
        first = engine.upkeep.verify()
        await anext(first)
        with pytest.raises(ConflictError, match="another verification is under way"):
            await verified(engine)
        await first.aclose()
        assert (await verified(engine))[-1].damage is None


async def test_copies_in_use_stay_and_the_others_are_evicted_and_brought_back(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        slabs = list(training.job.slabs())
        pin = await engine.pins.fetch(training.job, "block.0", Kind.PARAM)
        for slab in slabs:
            engine.pins.unpin(await engine.pins.fetch(training.job, slab.key.group, slab.key.kind))
        total = sum(slab.paged_bytes for slab in slabs)
        used, free = engine.host.used_bytes, engine.host_cache.evictable_bytes
        assert free == total - pin.slab.paged_bytes

        moved = await engine.upkeep.evict_copies("job")
        assert (moved.slabs, moved.nbytes, moved.left_bytes) == (len(slabs) - 1, free, pin.slab.paged_bytes)
        assert engine.host.used_bytes == used - free
        engine.pins.unpin(pin)

        moved = await engine.upkeep.promote("job")
        assert (moved.slabs, moved.nbytes, moved.left_bytes) == (len(slabs) - 1, free, 0)
        assert moved.present_bytes == pin.slab.paged_bytes and engine.host.used_bytes == used
        hits = engine.host.counters.hits
        for slab in slabs:
            engine.pins.unpin(await engine.pins.fetch(training.job, slab.key.group, slab.key.kind))
        assert engine.host.counters.hits == hits + len(slabs)
        await training.assert_at(1)
        assert (await engine.upkeep.evict_copies()).nbytes == total
        with pytest.raises(NotFoundError, match="there is no job 'other'"):
            await engine.upkeep.promote("other")


async def test_a_promotion_evicts_nothing_and_leaves_out_what_has_no_room(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        await engine.upkeep.evict_copies()
        first = await engine.pins.fetch(training.job, "block.0", Kind.PARAM)
        engine.pins.unpin(first, 7.0)
        filler = await engine.host.allocate(engine.host.budget_bytes - engine.host.used_bytes)
        moved = await engine.upkeep.promote("job")
        total = sum(slab.paged_bytes for slab in training.job.slabs())
        assert (moved.slabs, moved.left_bytes) == (0, total - first.slab.paged_bytes)
        assert first.slab.current_copy is not None, "the copy with a next use stays"
        engine.host.free(filler)


@pytest.mark.parametrize("asks", ["before the update", "during the update"])
async def test_a_promotion_reads_nothing_to_the_place_in_which_an_update_works(tmp_path: Path, asks: str) -> None:
    """Moments that live in host memory are updated in their place there, where a promotion must not read older ones."""
    layout = Layout(weights=TierName.NVME, moments=TierName.HOST)
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        await engine.upkeep.evict_copies()
        is_updating, may_finish = threading.Event(), threading.Event()
        reading, may_read = asyncio.Event(), asyncio.Event()
        read_into = engine.backing.read_into

        def gated(kernel: Kernel) -> Kernel:
            def work(tile: UpdateTile) -> None:
                kernel(tile)
                is_updating.set()
                assert may_finish.wait(30)

            return work

        async def gated_read(*arguments: Any) -> None:
            reading.set()
            await may_read.wait()
            await read_into(*arguments)

        with patch.object(engine.backing, "read_into", gated_read):
            if asks == "before the update":
                # The promotion has found no update, and reads the weights, when the update of the moments begins.
                promotion: asyncio.Future[object] = asyncio.ensure_future(engine.upkeep.promote("job"))
                await reading.wait()
            await training.hand_over(wrap=gated)
            await asyncio.to_thread(is_updating.wait, 30)
            if asks == "during the update":
                # A window may have queued the fetch before the update began, so the queue itself must wait, too.
                moments = training.job.slab("block.0", Kind.EXP_AVG)
                promotion = asyncio.ensure_future(engine.queue.promote(moments))
            may_read.set()
            await asyncio.wait([promotion], timeout=0.2)
            may_finish.set()
            await promotion
        await training.commit(2)
        await training.assert_at(2)


async def test_bytes_at_home_in_host_memory_are_promoted_only_while_a_run_has_room_for_them(tmp_path: Path) -> None:
    """Copies at home are never evicted, so without a run they would keep other jobs from the room until a restart."""
    layout = Layout(weights=TierName.NVME, moments=TierName.HOST)
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        home = training.job.tally.home_bytes
    async with opened(tmp_path, **ROOMY) as engine:
        used = engine.host.used_bytes
        moved = await engine.upkeep.promote("job")
        assert (moved.nbytes, moved.left_bytes) == (training.version_bytes - home, home)
        assert engine.host_cache.evictable_bytes == engine.host.used_bytes - used
        training = await Training(engine, layout).open()
        moved = await engine.upkeep.promote("job")
        assert (moved.nbytes, moved.left_bytes) == (home, 0)
        await training.assert_at(1)


async def test_copies_at_home_in_host_memory_are_not_evicted(tmp_path: Path) -> None:
    layout = Layout(weights=TierName.HOST, moments=TierName.HOST)
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        moved = await engine.upkeep.evict_copies("job")
        assert moved.left_bytes > 0
        await training.step()
        await training.assert_at(2)


async def test_steps_are_listed_with_who_holds_them_and_the_bytes_of_each_tier(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step(settled=0)
        await engine.kept_steps.keep(training.job, 1, "one")
        await engine.kept_steps.keep(training.job, 1, "again")
        reader = await engine.step_readers.open(training.job, 0)
        await training.step(settled=1)
        await training.step(settled=2)
        held = await steps(engine)
        assert list(held) == sorted(held) and set(held) == {0, 1, *training.job.retained}
        newest = max(training.job.retained)
        assert [step for step, one in held.items() if one.is_newest] == [newest]
        assert {step for step, one in held.items() if one.is_retained} == set(training.job.retained)
        assert held[1].kept_as == ("again", "one") and held[1].is_durable
        assert (held[0].readers, held[1].readers, held[0].is_retained) == (1, 0, False)
        # Step 0 has the weights only, because the moments are zeros that were never written.
        version, first = training.version_bytes, training.version_bytes // 3
        size = {step: one.size_bytes[TierName.NVME] for step, one in held.items()}
        assert size == dict.fromkeys(held, version) | {0: first}
        # No two steps share a byte, because each step has written every slab.
        assert {step: one.alone_bytes for step, one in held.items()} == size
        assert sum(one.alone_bytes for one in held.values()) == engine.nvme.used_bytes
        assert held[newest].size_bytes[TierName.HOST] == training.job.tally.copied_bytes
        reader.close()
        assert 0 not in await steps(engine)
        with pytest.raises(NotFoundError, match="there is no job 'other'"):
            await steps(engine, "other")


async def test_steps_that_share_bytes_say_what_is_theirs_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout(groups=("trained", "idle"))).begin()
        await training.hand_over(["trained"])
        await training.commit(1, settled=0)
        held = await steps(engine)
        # Step 0 has the weights of both groups. Step 1 shares those of the group that it has not trained.
        weights = training.job.group("idle").slab(Kind.PARAM, "job").paged_bytes
        assert [one.alone_bytes for one in held.values()] == [weights, 3 * weights]
        assert [one.size_bytes[TierName.NVME] for one in held.values()] == [2 * weights, 4 * weights]


async def test_a_job_of_which_only_kept_steps_are_left_lists_them(tmp_path: Path) -> None:
    layout = Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=0)
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        (step,) = (await steps(engine)).values()
        assert not step.is_durable and step.size_bytes[TierName.HOST] == training.version_bytes
        await engine.kept_steps.keep(training.job, None, "one")
    async with opened(tmp_path, **ROOMY) as engine:
        (kept,) = (await steps(engine)).values()
        assert (kept.kept_as, kept.is_retained, kept.is_newest) == (("one",), False, False)
        assert (await verified(engine, "job"))[-1].verified_bytes == engine.nvme.used_bytes > 0
