"""Host memory that is lent: within its limits, never at the cost of the lender's own jobs, and without old bytes."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from storage.base.errors import BudgetExceededError, InvalidRequestError
from storage.base.shard import Kind, TierName
from storage.engine import Engine
from storage.jobs.accounts import Holder
from storage.state.slab import NEVER
from storage.tiers.lent import MAX_LOANS, SEGMENT_BYTES, Loan
from tests.unit.storage.builders import MIB, Layout, Training, opened

DATA = memoryview(bytes(range(256)) * (SEGMENT_BYTES // 256))


def loan_of(engine: Engine, nbytes: int, identity: str = "token") -> Loan:
    return engine.lent.open("borrower", identity, "peer", nbytes)


async def test_what_is_kept_is_read_and_nothing_else_is_shown(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=16 * MIB, lend_bytes=8 * MIB) as engine:
        before = engine.host.allocate_free(SEGMENT_BYTES)
        assert before is not None
        engine.host.view(before)[:] = DATA
        engine.host.free(before)
        loan = loan_of(engine, 4 * MIB)
        assert loan.used_bytes == 0 and loan.read(0, 4096) is None
        # These bytes lie in two segments, which another user of the arena had before.
        start = SEGMENT_BYTES - 4096
        assert loan.keep(start, DATA[:8192])
        assert loan.used_bytes == 2 * SEGMENT_BYTES
        assert bytes(loan.read(start, 8192) or b"") == bytes(DATA[:8192])
        # The borrower has not written these bytes, which have the same segment.
        assert loan.read(0, 4096) is None and loan.read(start - 4096, 8192) is None
        for first_byte, nbytes in ((4 * MIB - 1, 2), (0, 0), (0, SEGMENT_BYTES + 1)):
            with pytest.raises(InvalidRequestError, match=f"of a loan of {4 * MIB} bytes"):
                loan.read(first_byte, nbytes)
        loan.end()
        assert engine.lent.used_bytes == 0 and not engine.lent.loans and not loan.keep(0, DATA)


async def test_a_part_of_a_segment_that_was_taken_back_does_not_come_again_with_the_rest(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=16 * MIB, lend_bytes=8 * MIB) as engine:
        loan = loan_of(engine, 4 * MIB)
        assert loan.keep(0, DATA[:4096]) and loan.keep(4096, DATA[:8000])
        range_ = await engine.host.allocate(engine.host.budget_bytes - engine.host.used_bytes + SEGMENT_BYTES)
        assert loan.used_bytes == 0
        engine.host.free(range_)
        assert loan.keep(4096, DATA[:8000])
        assert loan.read(0, 4096) is None
        assert bytes(loan.read(4096, 8000) or b"") == bytes(DATA[:8000])
        loan.end()


async def test_a_chunk_that_is_kept_costs_the_same_in_a_loan_of_any_size(tmp_path: Path) -> None:
    """The event loop of a lender has other work than to look at each segment of a loan for each chunk."""

    def most_bytes_of_a_keep() -> int:
        tracemalloc.start()
        try:
            assert loan.keep(0, DATA[:4096])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    async with opened(tmp_path, host_budget_bytes=80 * MIB, lend_bytes=64 * MIB) as engine:
        loan = loan_of(engine, 64 * MIB)
        assert loan.keep(0, DATA)
        of_one = most_bytes_of_a_keep()
        assert all(loan.keep(number * MIB, DATA) for number in range(1, 64))
        assert most_bytes_of_a_keep() < of_one + 1024
        loan.end()


async def test_a_chunk_for_whose_end_there_is_no_room_takes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, host_budget_bytes=16 * MIB, lend_bytes=2 * MIB) as engine:
        loan, other = loan_of(engine, 4 * MIB), loan_of(engine, 4 * MIB)
        assert loan.keep(0, DATA)
        # The first of the two segments of this chunk would be the last one of the budget.
        assert not other.keep(SEGMENT_BYTES - 4096, DATA[:8192])
        assert (loan.used_bytes, other.used_bytes, engine.lent.used_bytes) == (SEGMENT_BYTES, 0, SEGMENT_BYTES)
        loan.end()
        other.end()


async def test_a_loan_ends_while_a_prefetch_waits_for_more_room_than_it_frees(tmp_path: Path) -> None:
    """The first range that was freed once had the prefetch take back others, which the end of the loan then missed."""
    async with opened(tmp_path, host_budget_bytes=32 * MIB, nvme_budget_bytes=128 * MIB, lend_bytes=4 * MIB) as engine:
        training = await Training(engine, Layout(numels=(1_500_003,), groups=("block.0",))).begin()
        for slab in training.job.slabs():
            engine.host_cache.free_copy(slab)
        held = []
        while range_ := engine.host.allocate_free(SEGMENT_BYTES):
            held.append(range_)
        engine.pins.prefetch("rank", training.job, [("block.0", Kind.PARAM, 1)])
        # Three segments are free that are no neighbours, and the prefetch needs six in a row.
        for range_ in held[:6:2]:
            engine.host.free(range_)
        loan = loan_of(engine, 4 * MIB)
        assert [loan.keep(number * MIB, DATA) for number in range(4)] == [True, True, True, False]
        loan.end()
        assert engine.lent.used_bytes == 0
        for range_ in (*held[1:6:2], *held[6:]):
            engine.host.free(range_)
        await training.assert_at(0)


async def test_results_of_early_updates_take_the_place_of_lent_memory(tmp_path: Path) -> None:
    layout = Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=0)
    async with opened(tmp_path, host_budget_bytes=32 * MIB, lend_bytes=32 * MIB) as engine:
        training = await Training(engine, layout).begin()
        loan, kept = loan_of(engine, 32 * MIB), 0
        while loan.keep(kept * MIB, DATA):
            kept += 1
        await training.hand_over(aside=True)
        async with asyncio.timeout(10):
            while engine.shadows.waiting != len(layout.groups):
                await asyncio.sleep(0.001)
        assert loan.taken_back_bytes
        await training.commit(1)
        await training.assert_at(1)
        loan.end()


async def test_the_limits_hold_for_all_for_one_borrower_and_when_they_change(tmp_path: Path) -> None:
    async with opened(
        tmp_path, host_budget_bytes=16 * MIB, lend_bytes=4 * MIB, lend_bytes_per_borrower=3 * MIB
    ) as engine:
        first, second, other = (loan_of(engine, 64 * MIB, identity) for identity in ("a", "a", "b"))
        assert first.size_bytes == 3 * MIB
        assert [first.keep(n * MIB, DATA) for n in range(2)] == [True, True]
        assert [second.keep(n * MIB, DATA) for n in range(2)] == [True, False]
        assert [other.keep(n * MIB, DATA) for n in range(2)] == [True, False]
        assert engine.lent.used_bytes == 4 * MIB
        # All loans of one identity together have its limit, and the segment that it took last goes.
        engine.lent.resize(64 * MIB, 2 * MIB)
        assert [loan.used_bytes for loan in (first, second, other)] == [2 * MIB, 0, MIB]
        assert [loan.taken_back_bytes for loan in (first, second, other)] == [0, MIB, 0]
        first.changed.clear()
        engine.lent.resize(MIB, None)
        assert engine.lent.used_bytes == MIB and first.changed.is_set() and first.size_bytes == MIB
        engine.lent.resize(0, None)
        assert engine.lent.used_bytes == 0 and first.size_bytes == 0
        with pytest.raises(BudgetExceededError, match="lend_budget is 0"):
            loan_of(engine, MIB)
        engine.lent.resize(2 * MIB, None)
        assert second.keep(0, DATA)
        second.discard(0, 2 * MIB)
        assert engine.lent.used_bytes == 0
        for loan in engine.lent.loans:
            loan.end()
        for _ in range(MAX_LOANS):
            loan_of(engine, MIB)
        with pytest.raises(BudgetExceededError, match=f"{MAX_LOANS} loans"):
            loan_of(engine, MIB)
        engine.lent.close()


async def test_own_bytes_come_first_and_no_copy_is_evicted_for_a_loan(tmp_path: Path) -> None:
    async with opened(tmp_path, lend_bytes=4 * MIB) as engine:
        training = await Training(engine, Layout()).begin()
        pin = await training.engine.pins.fetch(training.job, "block.0", Kind.PARAM)
        engine.pins.unpin(pin)
        loan, kept = loan_of(engine, 4 * MIB), 0
        while loan.keep(kept * MIB, DATA):
            kept += 1
        assert kept and pin.slab.current_copy is pin.copy
        host = (await engine.accountant.take())[0]
        assert host.held_bytes[Holder.LENT] == kept * MIB and host.is_balanced
        # A range that needs all free room and one lent segment is granted at once, and evicts nothing.
        range_ = engine.host.try_allocate(MIB, NEVER)
        assert range_ is not None and loan.taken_back_bytes == MIB and pin.slab.current_copy is pin.copy
        assert loan.read((kept - 1) * MIB, MIB) is None
        engine.host.free(range_)
        await training.step()
        await training.assert_at(1)
        loan.end()
