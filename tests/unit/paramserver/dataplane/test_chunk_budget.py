"""The budget for chunks is bounded, shared by the weights of jobs, taken from transfers that stall, and never lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

import pytest

from paramserver.contract.chunks import MAX_CHUNK_BYTES
from paramserver.dataplane.chunk_budget import (
    FIRST_CHUNK_BYTES,
    STALLED_SECONDS,
    ChunkBudget,
    Transfer,
)
from paramserver.errors import TransferStalledError
from paramserver.rpc.urgency import Urgency

MIB = 1 << 20
HALF = 32 * MIB


def chunk_budget(stall_seconds: float = 10.0, **weights: float) -> ChunkBudget:
    return ChunkBudget(2 * HALF, stall_seconds=stall_seconds, weight_of=lambda job: weights.get(job, 1.0))


async def prove(room: ChunkBudget, transfer: Transfer) -> None:
    """Let the transfer's chunks grow to their largest, as for a client that takes its first chunks at once."""
    transfer.is_proven = True
    while transfer.chunk_bytes < MAX_CHUNK_BYTES:
        await room.reserve(transfer, transfer.chunk_bytes)
        room.moved(transfer, transfer.held_bytes)


async def test_a_transfer_begins_small_and_grows_once_its_client_has_shown_that_it_reads() -> None:
    room = chunk_budget()
    with room.open("session", "job", Urgency.DEMAND) as transfer:
        for _ in range(3):
            await room.reserve(transfer, FIRST_CHUNK_BYTES)
            room.moved(transfer, FIRST_CHUNK_BYTES)
            assert room.chunk_bytes(transfer) == FIRST_CHUNK_BYTES
        await prove(room, transfer)
        assert room.chunk_bytes(transfer) == MAX_CHUNK_BYTES
        await room.reserve(transfer, MAX_CHUNK_BYTES)
        await asyncio.sleep(1.2 * STALLED_SECONDS)
        room.moved(transfer, MAX_CHUNK_BYTES)
        assert room.chunk_bytes(transfer) == FIRST_CHUNK_BYTES, "it was slow"
        assert room.count("session") == 1
    assert (room.used_bytes, room.count("session")) == (0, 0)


async def test_what_is_short_is_shared_by_the_weights_of_jobs_equally_inside_and_demand_goes_first() -> None:
    room = chunk_budget(heavy=3.0)
    members = [("heavy", "h0"), ("light", "l0"), ("light", "l1"), ("late", "p0")]
    served: Counter[str] = Counter()

    async def take(transfer: Transfer) -> None:
        while True:
            await room.reserve(transfer, 2 * MIB)
            served[transfer.session_id] += 1
            await asyncio.sleep(0)
            room.moved(transfer, 2 * MIB)

    with ExitStack() as opened:
        holder = opened.enter_context(room.open("holder", "holder", Urgency.DEMAND))
        await prove(room, holder)
        tasks = []
        for job, session in members:
            # Each job has more transfers than there is room for.
            for _ in range(20):
                urgency = Urgency.PREFETCH if job == "late" else Urgency.DEMAND
                transfer = opened.enter_context(room.open(session, job, urgency))
                await prove(room, transfer)
                tasks.append(transfer)
        await room.reserve(holder, HALF - 2 * MIB)
        running = [asyncio.ensure_future(take(transfer)) for transfer in tasks]
        while sum(served.values()) < 800:
            await asyncio.sleep(0)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    light = served["l0"] + served["l1"]
    assert abs(served["h0"] - 3 * light) <= 24, served
    assert abs(served["l0"] - served["l1"]) <= 4, served
    assert served["p0"] <= 1, served
    assert room.used_bytes == 0


async def test_those_that_stall_are_ended_when_others_need_the_room_the_longest_first() -> None:
    room = chunk_budget()
    with ExitStack() as opened:
        other = opened.enter_context(room.open("other", "job", Urgency.DEMAND))
        await prove(room, other)
        stalled = []
        for number in range(16):
            transfer = opened.enter_context(room.open(f"s{number}", "job", Urgency.DEMAND))
            await prove(room, transfer)
            await room.reserve(transfer, 2 * MIB)
            stalled.append(transfer)
        assert room.used_bytes == HALF
        await asyncio.sleep(2 * STALLED_SECONDS)
        assert not any(transfer.ended.done() for transfer in stalled), "nobody needs the room"
        waiting = asyncio.ensure_future(room.reserve(other, 2 * MIB))
        async with asyncio.timeout(10):
            while not stalled[0].ended.done():
                await asyncio.sleep(0.01)
        assert [transfer.ended.done() for transfer in stalled] == [True] + [False] * 15
        with pytest.raises(TransferStalledError, match="2097152 bytes have not moved"):
            stalled[0].ended.result()
        # gRPC still holds half of the ended transfer's bytes until the call is over, so the waiter gets no room yet.
        with room.pinned(stalled[0], MIB):
            assert room.used_bytes == HALF - MIB and not waiting.done()
            assert room.chunk_bytes(other) < MAX_CHUNK_BYTES, "what is pinned makes chunks smaller"
        await asyncio.wait_for(waiting, 10)
        assert room.used_bytes == HALF
    assert room.used_bytes == 0


async def test_one_that_does_not_move_at_all_is_ended_after_the_stall_time_out() -> None:
    room = chunk_budget(stall_seconds=0.2)
    with room.open("session", "job", Urgency.DEMAND) as idle, room.open("session", "job", Urgency.DEMAND) as stalled:
        await room.reserve(stalled, FIRST_CHUNK_BYTES)
        with pytest.raises(TransferStalledError, match=r"stream_stall_seconds, 0\.2"):
            await asyncio.wait_for(asyncio.shield(stalled.ended), 10)
        assert not idle.ended.done(), "it holds nothing"


async def test_waiters_that_give_up_leave_nothing_behind() -> None:
    room = chunk_budget()
    with ExitStack() as opened:
        first, second, third = (opened.enter_context(room.open("s", "job", Urgency.DEMAND)) for _ in range(3))
        await room.reserve(first, HALF)
        waiting = asyncio.ensure_future(room.reserve(second, HALF))
        behind = asyncio.ensure_future(room.reserve(third, FIRST_CHUNK_BYTES))
        await asyncio.sleep(0)
        assert not room.try_reserve(third, 1), "others wait"
        room.moved(first, FIRST_CHUNK_BYTES)
        waiting.cancel()
        await asyncio.wait_for(behind, 10)
        granted = asyncio.ensure_future(room.reserve(second, FIRST_CHUNK_BYTES))
        await asyncio.sleep(0)
        room.moved(first, FIRST_CHUNK_BYTES)
        # The waiter has been granted its bytes and has not run since, so it is cancelled while it owns them.
        granted.cancel()
        await asyncio.wait([granted])
    assert room.used_bytes == 0


async def test_one_that_waits_for_much_room_does_not_hold_up_a_more_urgent_one() -> None:
    room = chunk_budget()
    with ExitStack() as stack:
        stalled = stack.enter_context(room.open("slow", "job", Urgency.DEMAND))
        await room.reserve(stalled, 2 * MIB)
        # gRPC keeps these bytes, so no transfer that is ended makes room.
        stack.enter_context(room.pinned(stalled, 2 * MIB))
        large = stack.enter_context(room.open("loan", "", Urgency.PREFETCH))
        waiting = asyncio.ensure_future(room.reserve(large, HALF))
        await asyncio.sleep(0)
        urgent = stack.enter_context(room.open("urgent", "job", Urgency.DEMAND))
        later = stack.enter_context(room.open("later", "job", Urgency.PREFETCH))
        assert room.try_reserve(urgent, MIB) and not room.try_reserve(later, MIB)
        async with asyncio.timeout(30):
            await room.reserve(urgent, MIB)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
    assert room.used_bytes == 0


async def test_bytes_that_cannot_be_taken_back_count_when_a_transfer_asks_whether_it_can_have_room() -> None:
    room = chunk_budget()
    with room.open("slow", "job", Urgency.DEMAND) as stalled, room.open("loan", "", Urgency.PREFETCH) as loan:
        await room.reserve(stalled, 2 * MIB)
        assert room.can_fit(loan, HALF) and not room.can_fit(loan, HALF + 1)
        with room.pinned(stalled, MIB):
            assert room.can_fit(loan, HALF - MIB) and not room.can_fit(loan, HALF - MIB + 1)
        assert room.can_fit(loan, HALF)
