"""The lender answers a borrower at once if it cannot send the bytes, because the borrower has them elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from paramserver.contract import chunks
from paramserver.dataplane.chunk_budget import ChunkBudget
from paramserver.dataplane.lending import Lending
from paramserver.rpc.urgency import Urgency
from paramserver.v1 import parameter_store_pb2 as pb

MIB = 1 << 20
ADDRESS = 3 * MIB


class Context:
    """The stream of a borrower that notes what it gets."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def write(self, message: bytes) -> None:
        self.messages.append(message)


class Loan:
    """A loan that has all bytes."""

    def read(self, first_byte: int, nbytes: int) -> bytes:
        return bytes([first_byte // MIB]) * nbytes


async def test_a_read_for_which_ended_transfers_leave_no_room_is_answered_as_gone() -> None:
    room = ChunkBudget(4 * MIB, stall_seconds=10.0)
    lending = Lending(cast(Any, None), room, cast(Any, None), lambda: None)
    span = pb.AccessLoanRequest.Span(first_byte=ADDRESS, size_bytes=MIB)
    with room.open("slow", "job", Urgency.DEMAND) as stalled, room.open("loan", "", Urgency.PREFETCH) as transfer:
        await room.reserve(stalled, 4096)
        context = Context()
        with room.pinned(stalled, 4096):
            async with asyncio.timeout(30):
                await lending._send(cast(Any, Loan()), transfer, span, cast(Any, context))
        assert pb.AccessLoanResponse.FromString(context.messages.pop()).WhichOneof("message") == "gone"
        room.moved(stalled, stalled.held_bytes)
        await lending._send(cast(Any, Loan()), transfer, span, cast(Any, context))
        assert context.messages == [chunks.encode(ADDRESS, bytes([3]) * MIB)]
