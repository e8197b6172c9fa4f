"""An engine in whose hierarchy a third tier takes part: a tier that only the tests have, and that is not durable.

Whatever is placed on it, the bytes are those of the engine with two tiers, and of torch.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.base.errors import BudgetExceededError, InvalidRequestError
from storage.base.shard import DType, Kind, TierName
from storage.engine import Engine
from storage.jobs.accounts import Holder
from tests.unit.storage.builders import MIB, Layout, Training, opened
from tests.unit.storage.folder_tier import FolderTier

BUDGET = 16 * MIB
FOLDER = TierName.GPU
numbers = itertools.count()


@asynccontextmanager
async def with_folder(directory: Path, **changes: Any) -> AsyncIterator[tuple[Engine, FolderTier]]:
    """Open an engine with a third tier, whose folder is a new one each time: none outlives its engine."""
    folder = FolderTier(directory / f"folder.{next(numbers)}", BUDGET)
    async with opened(directory / "state", [folder], **changes) as engine:
        yield engine, folder
    assert folder.is_closed


def layout(weights: TierName, moments: TierName, every_steps: int, precision: DType = DType.FLOAT32) -> Layout:
    return Layout(weights=weights, moments=moments, every_steps=every_steps, precision=precision)


def evict_all(training: Training) -> None:
    """Drop the copies in host memory, so that the next use of a slab reads its backing tier."""
    for slab in training.job.slabs():
        if not slab.at_home_in_host:
            training.engine.host_cache.free_copy(slab)


async def bytes_of(training: Training) -> dict[tuple[str, Kind], bytes]:
    """Return the newest bytes of all slabs."""
    found = {}
    for slab in training.job.slabs():
        pin = await training.engine.pins.fetch(training.job, slab.key.group, slab.key.kind)
        found[slab.key.group, slab.key.kind] = bytes(training.engine.host.view(pin.arena_range)[: slab.nbytes])
        training.engine.pins.unpin(pin)
    return found


async def prefetch_all(training: Training) -> None:
    """Bring the parameters of all groups into host memory ahead of their use."""
    evict_all(training)
    slabs = [training.job.slab(name, Kind.PARAM) for name in training.layout.groups]
    wants = [(slab.key.group, slab.key.kind, float(n)) for n, slab in enumerate(slabs)]
    training.engine.pins.prefetch("rank", training.job, wants)
    async with asyncio.timeout(20):
        while any(slab.current_copy is None for slab in slabs):
            await asyncio.sleep(0.001)
    training.engine.queue.replace_window("rank", [])


@pytest.mark.parametrize("precision", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("every_steps", [0, 1, 2])
@pytest.mark.parametrize(
    ("weights", "moments"),
    [(FOLDER, TierName.NVME), (TierName.NVME, FOLDER), (TierName.HOST, FOLDER), (FOLDER, FOLDER)],
)
async def test_training_over_three_tiers_gives_the_bytes_of_two(
    tmp_path: Path, weights: TierName, moments: TierName, every_steps: int, precision: DType
) -> None:
    three = layout(weights, moments, every_steps, precision)
    on_nvme = {FOLDER: TierName.NVME}
    two = replace(three, weights=on_nvme.get(weights, weights), moments=on_nvme.get(moments, moments))
    async with AsyncExitStack() as stack:
        engine, folder = await stack.enter_async_context(with_folder(tmp_path / "three"))
        trainings = [
            await Training(engine, three).begin(),
            await Training(await stack.enter_async_context(opened(tmp_path / "two")), two).begin(),
        ]
        for step in range(1, 5):
            for training in trainings:
                await training.step()
                if step % 2:
                    evict_all(training)
                await training.assert_at(step)
        assert await bytes_of(trainings[0]) == await bytes_of(trainings[1])
        for training in trainings:
            await prefetch_all(training)
            await training.assert_at(4)
        # Where every commit is durable, all versions go straight to the durable tier.
        assert (folder.counters.bytes_written > 0) == (folder.counters.bytes_read > 0) == (every_steps != 1)
        kept = {slab.spec.placement for slab in trainings[0].job.slabs() if slab.backing is FOLDER}
        assert kept == (set() if every_steps == 1 else {FOLDER})
        await engine.delete_job("job")
        assert folder.used_bytes == 0 and engine.nvme.used_bytes == 0


async def test_a_snapshot_copies_what_is_on_a_volatile_tier_while_training_goes_on(tmp_path: Path) -> None:
    wanted = layout(FOLDER, FOLDER, 2)
    async with with_folder(tmp_path) as (engine, folder):
        training = await Training(engine, wanted).begin()
        for _ in range(5):
            assert not await training.step()
            evict_all(training)
        assert training.job.snapshot is not None
        await asyncio.wait([training.job.snapshot])
        assert max(training.job.durable) == 4
        assert {region.tier.name for slab in training.job.slabs() for region in slab.versions.values()} == {
            FOLDER,
            TierName.NVME,
        }
        await training.assert_at(5)
        used = {account.tier: account for account in await engine.accountant.take()}
        assert used[FOLDER].held_bytes[Holder.JOBS] == folder.used_bytes > 0
    # The bytes on the volatile tier alone are gone, so the job goes on from its last snapshot.
    async with with_folder(tmp_path) as (engine, folder):
        training = await Training(engine, wanted).open()
        assert (training.job.newest, folder.used_bytes) == (4, 0)
        await training.assert_at(4)
        await training.step()
        assert folder.used_bytes > 0
        await training.assert_at(5)


async def test_a_job_of_a_tier_that_is_gone_opens_and_goes_on_elsewhere(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as (engine, _):
        training = await Training(engine, layout(FOLDER, FOLDER, 2)).begin()
        await training.step()
        await training.step()
        assert training.job.snapshot is not None
        await asyncio.wait([training.job.snapshot])
    async with opened(tmp_path / "state") as engine:
        with pytest.raises(InvalidRequestError, match=r"'block.0': this store has no gpu tier; .* on host or nvme"):
            await Training(engine, layout(FOLDER, FOLDER, 2)).open()
        training = await Training(engine, layout(TierName.NVME, TierName.HOST, 2)).open()
        await training.assert_goes_on_from(2)


async def test_a_step_on_a_volatile_tier_can_be_read_undone_and_gone_back_to(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as (engine, folder):
        training = await Training(engine, layout(FOLDER, TierName.NVME, 0)).begin()
        await training.step()
        held = await bytes_of(training)
        reader = await engine.step_readers.open(training.job)
        with_reader = folder.used_bytes
        for _ in range(3):
            await training.step(settled=1)
            evict_all(training)
        for group in training.layout.groups:
            shard = training.layout.group(group).shards[0]
            read = [piece async for piece in reader.read(shard.fqn, Kind.PARAM, 0, shard.numel)]
            assert b"".join(read) == held[group, Kind.PARAM][: shard.numel * 4]
        reader.close()
        await training.hand_over()
        await engine.pending_steps.withdraw(training.job, 5, "block.0")
        await engine.pending_steps.abandon(training.job)
        await training.assert_at(4)
        await engine.roll_back(training.job, 2)
        await training.assert_goes_on_from(2)
        assert folder.used_bytes <= with_reader


async def test_the_budget_of_a_third_tier_is_checked_when_groups_are_registered(tmp_path: Path) -> None:
    async with with_folder(tmp_path) as (engine, folder):
        folder.budget_bytes = MIB // 4
        with pytest.raises(BudgetExceededError, match="gpu_budget"):
            await Training(engine, layout(FOLDER, TierName.NVME, 0)).open(must_exist=False)
        assert await Training(engine, layout(TierName.NVME, TierName.NVME, 0)).begin()


async def test_a_kept_step_is_copied_from_a_tier_that_a_restart_loses(tmp_path: Path) -> None:
    of_folder = layout(FOLDER, TierName.NVME, every_steps=0)
    async with with_folder(tmp_path) as (engine, _):
        training = await Training(engine, of_folder).begin()
        await training.step()
        await engine.kept_steps.keep(training.job, 1, "one")
        await training.step()
        await training.assert_at(2)
    async with with_folder(tmp_path) as (engine, _):
        reader = await engine.step_readers.open(engine.kept_steps.find("job", "one"))
        for (_, fqn, kind), expected in training.reference.states(1).items():
            data = b"".join([piece async for piece in reader.read(fqn, kind, 0, len(expected))])
            assert data == expected.numpy().tobytes(), f"{fqn} {kind}"
        reader.close()
