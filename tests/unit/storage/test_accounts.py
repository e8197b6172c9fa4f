"""The accounts of the tiers attribute each used byte to its holder, and leaked bytes to none."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from storage.base import slices
from storage.base.errors import BudgetExceededError, ConflictError, NotFoundError
from storage.base.shard import Kind, TierName
from storage.engine import Engine
from storage.jobs.accounts import Holder, TierAccount
from storage.jobs.admission import Limit
from storage.state.slab import HostCopy
from storage.tiers.base import round_up
from storage.tiers.extents import Extent
from tests.unit.storage.builders import MIB, Layout, Training, on_nvme, opened, room_taken

ROOMY = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 32 * MIB}


async def accounts(engine: Engine) -> tuple[TierAccount, TierAccount]:
    host, nvme = await engine.accountant.take()
    assert (host.tier, nvme.tier) == (TierName.HOST, TierName.NVME)
    return host, nvme


def held(account: TierAccount) -> dict[Holder, int]:
    """Return the holders that hold bytes, with the number of bytes."""
    return {holder: nbytes for holder, nbytes in account.held_bytes.items() if nbytes}


async def test_each_holder_of_host_memory_is_named_with_its_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        fixed = engine.host.used_bytes
        assert held((await accounts(engine))[0]) == {Holder.FIXED: fixed}
        training = await Training(engine, Layout()).begin()
        await training.step()
        copies = engine.host.used_bytes - fixed
        assert held((await accounts(engine))[0]) == {Holder.FIXED: fixed, Holder.JOBS: copies}
        pin = await engine.pins.fetch(training.job, "block.0", Kind.PARAM)
        gradient = await engine.pending_steps.allocate_gradient(training.job, "block.0")
        found, _ = await accounts(engine)
        assert found.held_bytes[Holder.UNDER_WAY] == pin.arena_range.nbytes + gradient.nbytes
        assert not found.is_balanced and found.unexplained_bytes == 0
        range_ = gradient.arena_range
        assert range_ is not None
        found, _ = await engine.accountant.take(leased=lambda: [pin.arena_range], quarantined=lambda: [range_])
        assert found.held_bytes[Holder.LEASES] == pin.arena_range.nbytes
        assert found.held_bytes[Holder.QUARANTINE] == gradient.nbytes
        assert found.is_balanced
        engine.pins.unpin(pin)
        engine.gradients.free(gradient)


async def test_each_holder_on_nvme_is_named_with_its_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout()).begin()
        reader = await engine.step_readers.open(training.job)
        version = training.version_bytes
        # The optimizer states are not written before the first step, so the reader of step 0 holds no bytes of them.
        begun = reader.nbytes
        await training.step()
        await training.step()
        _, nvme = await accounts(engine)
        assert held(nvme) == {Holder.JOBS: version, Holder.READERS: begun}
        async with engine.nvme.new_version(5000, "scratch") as region:
            assert (await accounts(engine))[1].held_bytes[Holder.UNDER_WAY] == region.nbytes == 8192
            engine.nvme.free(region)
        reader.close()
        region = await engine.nvme.allocate(8192)
        engine.nvme.bad.add(Extent(region.extents[0].offset, 4096, region.extents[0].file))
        engine.nvme.free(region)
        assert held((await accounts(engine))[1]) == {Holder.JOBS: version, Holder.DAMAGED: 4096}


async def test_what_was_leaked_or_freed_twice_is_unexplained(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout()).begin()
        leaked, range_ = await engine.nvme.allocate(10_000), await engine.host.allocate(10_000)
        assert [account.unexplained_bytes for account in await accounts(engine)] == [12_288, 12_288]
        engine.nvme.free(leaked)
        engine.host.free(range_)
        assert all(account.is_balanced for account in await accounts(engine))
        slab = training.job.slab("block.0", Kind.EXP_AVG)
        # The job does not explain a copy that has no bytes and that no update or fetch is filling.
        slab.copy = HostCopy(await engine.host.allocate(slab.nbytes), step=None, at_home=False)
        assert (await accounts(engine))[0].unexplained_bytes == round_up(slab.nbytes)
        engine.host_cache.free_copy(slab)
        region = on_nvme(training.job.slab("block.0", Kind.PARAM).versions[0])
        engine.nvme.files[0].free(region.extents[0])
        assert (await accounts(engine))[1].unexplained_bytes == -region.extents[0].nbytes
        assert engine.nvme.files[0].allocate(region.extents[0].nbytes) == region.extents
    assert leaked.holders == 0


@pytest.mark.parametrize("home", [TierName.NVME, TierName.HOST])
async def test_accounts_that_are_taken_in_slices_while_a_job_trains_name_no_byte_as_leaked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: TierName
) -> None:
    # The event loop runs other tasks after each group.
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout(weights=home, moments=home)).begin()

        async def work() -> None:
            for step in range(6):
                await training.step()
                reader = await engine.step_readers.open(training.job)
                if step % 2:
                    await engine.kept_steps.keep(training.job, None, f"step {step}", note="")
                reader.close()

        working = asyncio.ensure_future(work())
        found: list[TierAccount] = []
        while not working.done():
            found += await accounts(engine)
        await working
        assert [account for account in found if account.unexplained_bytes] == []
        assert any(account.moved_bytes for account in found)
        assert all(account.is_balanced and not account.moved_bytes for account in await accounts(engine))


async def test_a_region_that_is_free_cannot_be_held_read_or_written(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        kept, freed = await engine.nvme.allocate(4096), await engine.nvme.allocate(4096)
        engine.nvme.free(freed)
        with pytest.raises(NotFoundError, match="scratch is not stored any more"):
            engine.nvme.hold(kept, freed)
        with pytest.raises(NotFoundError):
            await engine.nvme.read_into(freed, 0, memoryview(bytearray(4096)))
        with pytest.raises(NotFoundError):
            await engine.nvme.write_from(freed, 0, memoryview(bytearray(4096)))
        assert (kept.holders, freed.holders) == (1, 0)
        engine.nvme.free(kept)


async def test_a_registration_that_is_refused_leaves_homes_and_copies_as_they_were(tmp_path: Path) -> None:
    on_nvme, on_host = Layout(), Layout(weights=TierName.HOST, moments=TierName.HOST)
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, on_nvme).begin()
        await training.step()
        before = [(slab.spec, slab.backed) for slab in training.job.slabs()]
        moved = [on_host.group(name) for name in on_host.groups]
        quota = Limit(what="the quota of everybody", covers=lambda _: True, host_bytes=1)
        with pytest.raises(BudgetExceededError, match="quota"):
            await engine.register(training.job, moved, [quota])
        with room_taken(engine):
            registering = asyncio.ensure_future(engine.register(training.job, moved))
            for _ in range(10):
                await asyncio.sleep(0)
            registering.cancel()
            await asyncio.wait([registering])
        assert [(slab.spec, slab.backed) for slab in training.job.slabs()] == before
        assert not any(slab.copy is not None and slab.copy.at_home for slab in training.job.slabs())
        assert all(account.is_balanced for account in await accounts(engine))
        await training.step()
        await training.assert_at(2)


async def test_what_was_staged_or_is_to_be_put_is_freed_where_its_group_is_gone(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout()).begin()
        staged = await engine.pending_steps.allocate_put(training.job, 1, "block.0", Kind.PARAM)
        with pytest.raises(NotFoundError, match="no shard group 'gone'"):
            await engine.pending_steps.put(training.job, 1, "gone", Kind.PARAM, staged)
        await engine.delete_job("job")
        await training.open(must_exist=False)
        pin = await engine.pins.stage(training.job, "block.0", Kind.PARAM)
        await engine.delete_job("job")
        with pytest.raises((NotFoundError, ConflictError)):
            await engine.pins.publish(pin)
        assert all(account.is_balanced for account in await accounts(engine))
        assert engine.host.used_bytes == (await accounts(engine))[0].held_bytes[Holder.FIXED]


async def test_staging_that_waited_for_room_while_its_job_was_deleted_ends(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, Layout()).open(must_exist=False)
        with room_taken(engine):
            staging = asyncio.ensure_future(engine.pins.stage(training.job, "block.0", Kind.PARAM))
            await asyncio.sleep(0)
            await engine.delete_job("job")
        with pytest.raises(ConflictError, match=r"job 'job' was deleted while job/block\.0/param was waited for"):
            await staging


def test_an_account_is_settled_only_where_nothing_is_under_way_or_unexplained() -> None:
    account = TierAccount(tier=TierName.HOST, used_bytes=3, held_bytes={Holder.FIXED: 1, Holder.JOBS: 2})
    assert account.is_balanced
    assert not dataclasses.replace(account, used_bytes=4).is_balanced
    assert not dataclasses.replace(account, held_bytes={Holder.FIXED: 2, Holder.UNDER_WAY: 1}).is_balanced
