"""Training whose states are read from another engine's memory: the bits of torch, whatever the lender does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import DType, Kind
from storage.engine import Engine
from storage.state.slab import NEVER
from storage.tiers.base import TierCounters
from storage.tiers.contract import CopyTier, Move, Region
from storage.tiers.lent import SEGMENT_BYTES
from storage.tiers.loan_directory import LoanDirectory
from storage.tiers.nvme import NvmeRegion
from storage.tiers.remote import RemoteTier
from storage.tiers.source import LEAST_RATE_BYTES, LenderState, Rate
from tests.unit.storage.builders import MIB, ROOM_FOR_TILED, TILED, Layout, Training, opened, quiesce
from tests.unit.storage.forgery import forge
from tests.unit.storage.lender_in_process import LenderInProcess
from tests.unit.storage.test_third_tier import evict_all

TILES = Layout(numels=TILED, precision=DType.BFLOAT16)
# The retry is short because tests wait for the next loan. The time-out is long, so that no lender is late by accident.
QUICK: dict[str, Any] = {"timeout_seconds": 30.0, "retry_seconds": 0.02, "is_always_used": True}


@dataclass
class Pair:
    """A borrowing engine, the engine that lends to it, and the way between them."""

    borrower: Engine
    lending: Engine
    remote: RemoteTier
    lender: LenderInProcess
    events: list[str]

    async def borrowed(self) -> None:
        """Wait until there is a loan."""
        async with asyncio.timeout(20):
            while self.remote.lenders[0].state is LenderState.AWAY:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def paired(
    directory: Path, faster: Sequence[CopyTier[Any]] = (), lend_bytes: int = 16 * MIB
) -> AsyncIterator[Pair]:
    """Open both engines, the borrower with `faster` copy tiers, too; at the end check that nothing leaked on a side."""
    events: list[str] = []
    async with opened(directory / "lender", host_budget_bytes=32 * MIB, lend_bytes=lend_bytes) as lending:
        lender = LenderInProcess(lending.lent)
        told = lambda address, text: events.append(f"{address}: {text}")  # noqa: E731
        remote = RemoteTier([lender], budget_bytes=1 << 30, on_event=told, **QUICK)
        async with opened(directory / "borrower", (), [*faster, remote], **ROOM_FOR_TILED) as borrower:
            pair = Pair(borrower, lending, remote, lender, events)
            await pair.borrowed()
            yield pair
        assert lending.lent.used_bytes == 0 and not lending.lent.loans


async def trained(pair: Pair, layout: Layout = TILES, steps: int = 2) -> Training:
    """Train some steps, so that the states are with the lender, and evict them from the borrower's host memory."""
    training = await Training(pair.borrower, layout).begin()
    for _ in range(steps):
        evict_all(training)
        await training.step()
    await quiesce(pair.borrower)
    evict_all(training)
    return training


async def go_on(pair: Pair, training: Training) -> None:
    """Train one more step, and compare all bits with torch's."""
    step = training.job.next_step
    await training.step()
    await quiesce(pair.borrower)
    evict_all(training)
    await training.assert_at(step)


@pytest.mark.parametrize("precision", [DType.FLOAT32, DType.BFLOAT16])
async def test_states_are_read_from_the_lender_with_the_bits_of_torch(tmp_path: Path, precision: DType) -> None:
    async with paired(tmp_path) as pair:
        training = await trained(pair, Layout(numels=TILED, precision=precision))
        held = pair.remote.used_bytes
        assert held == training.version_bytes <= pair.lending.lent.used_bytes
        read, hits = pair.borrower.nvme.counters.bytes_read, pair.remote.counters.hits
        for _ in range(2):
            await go_on(pair, training)
        # All old bytes came from the lender, and each slab keeps its one room there.
        assert pair.borrower.nvme.counters.bytes_read == read
        assert pair.remote.counters.hits > hits and pair.remote.used_bytes == held
        remote = (await pair.borrower.accountant.take())[1]
        assert remote.used_bytes == held and remote.is_balanced
        await pair.borrower.delete_job("job")
        await asyncio.sleep(0)
        assert pair.remote.used_bytes == pair.lending.lent.used_bytes == 0


async def test_a_fetch_is_sent_to_the_lender_and_comes_from_there_the_next_time(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        training = await Training(pair.borrower, TILES).begin()
        evict_all(training)
        for expected in ("nvme", "lender"):
            read = pair.borrower.nvme.counters.bytes_read
            for group in TILES.groups:
                pair.borrower.pins.unpin(await pair.borrower.pins.fetch(training.job, group, Kind.PARAM, 1.0))
                await quiesce(pair.borrower)
            assert (pair.borrower.nvme.counters.bytes_read > read) is (expected == "nvme")
            evict_all(training)
        await training.assert_at(0)


async def test_a_lender_that_dies_loses_nothing_and_is_used_again(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        training = await trained(pair)
        pair.lender.die()
        await go_on(pair, training)
        assert pair.remote.used_bytes == 0
        assert sum("the lender was killed" in event for event in pair.events) == 1
        pair.lender.is_away = False
        await pair.borrowed()
        for _ in range(2):
            await go_on(pair, training)
        assert pair.remote.used_bytes == training.version_bytes
        assert pair.remote.lenders[0].losses == 1 and pair.lender.loans == 2


async def test_a_lender_that_dies_within_an_update_loses_nothing(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        training = await trained(pair)
        step = training.job.next_step
        pair.lender.is_stopped = True
        await training.hand_over()
        async with asyncio.timeout(20):
            while pair.remote.queue_depth == 0:
                await asyncio.sleep(0)
        pair.lender.die()
        await training.commit(step)
        await quiesce(pair.borrower)
        await training.assert_at(step)


async def test_a_lender_that_answers_nothing_is_given_up_after_the_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(tmp_path) as pair:
        training = await trained(pair)
        pair.lender.is_stopped = True
        # Only a stopped lender meets a short time-out, because on a busy machine an honest lender is late, too.
        with monkeypatch.context() as stopped:
            stopped.setattr(pair.remote, "_timeout_seconds", 0.2)
            await go_on(pair, training)
        assert pair.remote.lenders[0].timeouts == 1 and pair.remote.used_bytes == 0
        assert any("not answered within" in event or "not taken within" in event for event in pair.events)
        pair.lender.is_stopped = False
        await pair.borrowed()
        await go_on(pair, training)
        assert pair.remote.used_bytes == training.version_bytes


class Tampering:
    """What a hostile lender can do to the spans that are read of it. It has seen all bytes that were sent to it."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        # The first bytes that were read from each address, which are those of an older version later.
        self._seen: dict[int, bytes] = {}

    def remember(self, address: int, buffer: memoryview) -> None:
        """Keep what was read, and change nothing."""
        self._seen.setdefault(address, bytes(buffer))

    def spoil(self, _address: int, buffer: memoryview) -> None:
        """Change one byte."""
        buffer[0] ^= 1

    def forge(self, address: int, buffer: memoryview) -> None:
        """Change the first block so that its checksum stays the same. The lender has guessed the version's label."""
        for region, (_, copy) in self._pair.remote._copies._where.items():
            offset = address - copy.offset
            if copy.owns(region, max(offset, 0), 1) and 0 <= offset < copy.room_bytes:
                forge(buffer[:BLOCK_BYTES], region.label, offset // BLOCK_BYTES, 0x7F80_0000_7F80_0000)

    def replay(self, address: int, buffer: memoryview) -> None:
        """Return what was at this address earlier, if anything was."""
        if len(old := self._seen.get(address, b"")) == len(buffer):
            buffer[:] = old

    def swap(self, address: int, buffer: memoryview) -> None:
        """Return what was at another address, if there is one with as many bytes."""
        if others := [data for at, data in self._seen.items() if at != address and len(data) == len(buffer)]:
            buffer[:] = others[0]


@pytest.mark.parametrize("how", ["spoil", "forge", "replay", "swap"])
async def test_wrong_bytes_are_found_and_read_from_nvme(tmp_path: Path, how: str) -> None:
    async with paired(tmp_path) as pair:
        tampering = Tampering(pair)
        pair.lender.tamper = tampering.remember
        training = await trained(pair)
        pair.lender.tamper = getattr(tampering, how)
        before, hits = pair.remote.lenders[0].hits, pair.remote.counters.hits
        await go_on(pair, training)
        lender = pair.remote.lenders[0]
        assert lender.wrong_blocks > 0
        # The lender has served the reads of wrong bytes, but each of them needed NVMe, too.
        assert pair.remote.counters.hits - hits <= lender.hits - before - lender.wrong_blocks
        assert pair.borrower.nvme.damaged_blocks == 0
        assert sum("wrong bytes" in event for event in pair.events) == 1
        pair.lender.tamper = tampering.remember
        await go_on(pair, training)


async def test_memory_that_the_lender_takes_back_is_missed_only_in_time(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        training = await trained(pair)
        # The lender's own job needs all its memory.
        taken = []
        while (range_ := pair.lending.host.try_allocate(SEGMENT_BYTES, NEVER)) is not None:
            taken.append(range_)
        assert pair.lending.lent.used_bytes == 0
        await go_on(pair, training)
        assert pair.remote.lenders[0].misses > 0
        for range_ in taken:
            pair.lending.host.free(range_)
        # An operator lends nothing any more, and then again.
        pair.lending.lent.resize(0, None)
        await go_on(pair, training)
        assert pair.remote.used_bytes == 0
        pair.lending.lent.resize(16 * MIB, None)
        await asyncio.sleep(0.05)
        for _ in range(2):
            await go_on(pair, training)
        assert pair.remote.used_bytes == training.version_bytes


async def test_bytes_that_the_lender_does_not_send_cost_nothing_but_themselves(tmp_path: Path) -> None:
    """A lender that has no room for an answer says that it has not the bytes, and has the rest of the copy."""
    async with paired(tmp_path) as pair:
        nvme, tier, whole = pair.borrower.nvme, pair.remote, memoryview(bytearray(range(256)) * (4 * MIB // 256))
        old = await nvme.allocate(4 * MIB, "old")
        old.record(0, whole)
        assert tier.begin(old, None, NEVER)
        await tier.push([Move[Region](old, 0, whole)])
        async with asyncio.timeout(20):
            while not tier.has(old):
                await asyncio.sleep(0.001)
        ((_, _, copy),) = tier.split([Move[Region](old, 0, whole)], nvme.counters)[1]
        tiles = [Move[Region](old, offset, memoryview(bytearray(MIB))) for offset in range(0, 4 * MIB, MIB)]
        pair.lender.hidden.add(copy.offset + MIB)
        left = await tier.read(tier.split(tiles, nvme.counters)[1], verified=True)
        pair.lender.hidden.clear()
        assert [move.offset for move in left] == [MIB]
        assert [bytes(tile.buffer) == whole[:MIB] for tile in tiles] == [True, False, True, True]
        # The tile is sent again when it was read from NVMe, and comes from the lender then.
        elsewhere, remote = tier.split(tiles, nvme.counters)
        assert ([move.offset for move in elsewhere], len(remote)) == ([MIB], 3)
        assert tier.begin(old, None, NEVER) and tier.used_bytes == 4 * MIB
        await tier.push([Move[Region](old, MIB, whole[:MIB])])
        async with asyncio.timeout(20):
            while not tier.has(old):
                await asyncio.sleep(0.001)
        assert await tier.read(tier.split(tiles, nvme.counters)[1], verified=True) == []
        assert all(bytes(tile.buffer) == whole[:MIB] for tile in tiles)
        nvme.free(old)
        assert tier.used_bytes == 0


async def test_a_loan_that_is_too_small_keeps_the_same_part_in_each_step(tmp_path: Path) -> None:
    async with paired(tmp_path, lend_bytes=2 * MIB) as pair:
        training = await trained(pair)
        held = pair.remote.used_bytes
        assert 0 < held <= 2 * MIB < training.version_bytes
        hits, demotions = pair.remote.counters.hits, pair.remote.counters.demotions
        for _ in range(2):
            await go_on(pair, training)
        assert pair.remote.used_bytes == held and pair.remote.counters.demotions == demotions
        assert pair.remote.counters.hits > hits


async def test_steps_that_are_rolled_back_or_undone_are_read_from_nvme(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        training = await trained(pair)
        await training.hand_over()
        await pair.borrower.pending_steps.withdraw(training.job, 3, TILES.groups[0])
        await pair.borrower.pending_steps.abandon(training.job)
        await training.assert_at(2)
        await training.step(settled=2)
        await pair.borrower.roll_back(training.job, 2)
        evict_all(training)
        await training.assert_at(2)
        await go_on(pair, training)


async def test_bytes_of_a_version_count_for_no_newer_one_in_the_same_room(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        nvme, tier, buffer = pair.borrower.nvme, pair.remote, memoryview(bytearray(MIB))
        old, new = await nvme.allocate(MIB, "old"), await nvme.allocate(MIB, "new")
        assert tier.begin(old, None, NEVER) and tier.begin(new, old, NEVER)
        await tier.push([Move[Region](old, 0, buffer)])
        await tier.push([Move[Region](new, 0, buffer[: MIB // 2])])
        async with asyncio.timeout(20):
            while tier.split([Move[Region](new, 0, buffer[: MIB // 2])], nvme.counters)[0]:
                await asyncio.sleep(0.001)
        assert not tier.has(old) and not tier.has(new)
        assert tier.used_bytes == MIB
        nvme.free(old)
        nvme.free(new)
        assert tier.used_bytes == 0


async def test_two_lenders_together_give_no_more_than_the_budget(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB, lend_bytes=16 * MIB) as engine:
        lenders = [LenderInProcess(engine.lent, f"lender:{number}") for number in range(2)]
        tier = RemoteTier(lenders, budget_bytes=6 * MIB, retry_seconds=0.01)
        tier.start()
        await asyncio.sleep(0.05)
        assert sum(info.size_bytes for info in tier.lenders) == 6 * MIB
        await tier.close()
        assert not engine.lent.loans


async def test_a_second_lender_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB, lend_bytes=16 * MIB) as engine:
        lenders = [LenderInProcess(engine.lent, f"lender:{number}") for number in range(2)]
        tier = RemoteTier(lenders, budget_bytes=6 * MIB, retry_seconds=0.01)

        def sizes() -> list[int]:
            return [info.size_bytes // MIB for info in tier.lenders]

        tier.start()
        await asyncio.sleep(0.05)
        assert sizes() == [6, 0]
        lenders[0].die()
        await asyncio.sleep(0.05)
        assert sizes() == [0, 6]
        # The first one comes back, and gets what the second one has no more.
        lenders[0].is_away = False
        await asyncio.sleep(0.05)
        assert sizes() == [0, 6]
        engine.lent.resize(4 * MIB, None)
        await asyncio.sleep(0.05)
        assert sizes() == [2, 4]
        await tier.close()
        assert not engine.lent.loans


def test_a_rate_begins_anew_with_what_the_counters_are() -> None:
    """The seconds of a read that timed out, which has moved no bytes, belong to the loan that it has ended."""
    rate = Rate()
    rate.sample(LEAST_RATE_BYTES, 1.0)
    rate.reset(LEAST_RATE_BYTES, 3.0)
    assert rate.bytes_per_second is None
    rate.sample(2 * LEAST_RATE_BYTES, 4.0)
    assert rate.bytes_per_second == LEAST_RATE_BYTES


async def test_copies_that_are_needed_last_give_way_and_states_do_not_push_each_other_out(tmp_path: Path) -> None:
    directory = LoanDirectory()
    directory.resize(4 * BLOCK_BYTES)
    late, _ = directory.place(2 * BLOCK_BYTES, BLOCK_BYTES, 9.0)
    state, _ = directory.place(2 * BLOCK_BYTES, BLOCK_BYTES, NEVER)
    assert late is not None and state is not None
    assert directory.place(BLOCK_BYTES, BLOCK_BYTES, NEVER) == (None, [])
    soon, dropped = directory.place(BLOCK_BYTES, BLOCK_BYTES, 1.0)
    assert dropped == [state] and state.is_dropped and soon is not None
    second, dropped = directory.place(2 * BLOCK_BYTES, BLOCK_BYTES, 2.0)
    assert dropped == [late] and second is not None
    assert directory.used_bytes == 3 * BLOCK_BYTES
    assert directory.resize(2 * BLOCK_BYTES) == [soon]
    assert directory.used_bytes == 2 * BLOCK_BYTES and directory.copies == (second,)


class _Scenario:
    """A remote tier over regions of a real engine, whose NVMe has the speed that the test says."""

    def __init__(self, engine: Engine, lender: LenderInProcess, retry_seconds: float) -> None:
        self.nvme = TierCounters()
        self.tier = RemoteTier([lender], budget_bytes=16 * MIB, retry_seconds=retry_seconds)
        self.engine = engine

    async def read_all(self, region: NvmeRegion, buffer: memoryview, times: int) -> None:
        for _ in range(times):
            _, shared = self.tier.split([Move[Region](region, 0, buffer)], self.nvme)
            await self.tier.read(shared, verified=True)


@pytest.mark.parametrize(("seconds", "retry_seconds"), [(1e9, 3600.0), (1e-9, 3600.0), (1e-9, 0.01)])
async def test_a_lender_is_used_only_while_it_is_faster_than_nvme(
    tmp_path: Path, seconds: float, retry_seconds: float
) -> None:
    async with opened(tmp_path, host_budget_bytes=32 * MIB, lend_bytes=16 * MIB) as engine:
        scenario = _Scenario(engine, LenderInProcess(engine.lent), retry_seconds)
        tier = scenario.tier
        tier.start()
        while tier.lenders[0].state is LenderState.AWAY:
            await asyncio.sleep(0.001)
        buffer = memoryview(bytearray(MIB))
        region = await engine.nvme.allocate(MIB, "version")
        region.record(0, buffer)
        assert tier.begin(region, None, NEVER)
        await tier.push([Move[Region](region, 0, buffer)])
        while not tier.has(region):
            await asyncio.sleep(0.001)
        # NVMe has read this much in so many seconds.
        scenario.nvme.bytes_read, scenario.nvme.reading.seconds = LEAST_RATE_BYTES, seconds
        await scenario.read_all(region, buffer, 1 + LEAST_RATE_BYTES // MIB)
        if seconds > 1:
            assert tier.lenders[0].state is LenderState.IN_USE and tier.has(region)
        elif retry_seconds > 1:
            # It gets its memory back.
            assert tier.lenders[0].state is LenderState.SLOWER and tier.used_bytes == 0
            assert not tier.begin(region, None, NEVER)
            await asyncio.sleep(0)
            assert engine.lent.used_bytes == 0
        else:
            async with asyncio.timeout(20):
                while tier.lenders[0].state is not LenderState.TRIAL:
                    await asyncio.sleep(0.005)
            assert tier.begin(region, None, NEVER)
        await tier.close()
        engine.nvme.free(region)
