"""A copy tier that only the tests have: copies of versions in memory of the process, under a byte budget.

It fulfils `CopyTier`. Engines are given it by the name of the GPU tier, which the product does not have there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import TierName
from storage.tiers.base import TierCounters
from storage.tiers.contract import Move, Region


@dataclass(slots=True)
class _Copy:
    data: bytearray
    blocks: set[int] = field(default_factory=set)


class MemoryRead(NamedTuple):
    """A move, and the bytes of its copy."""

    move: Move[Region]
    data: bytearray


class MemoryCopies:
    """Copies in memory. With `is_forgetful`, it has lost each copy when the copy is read."""

    name = TierName.GPU
    problems: Sequence[str] = ()
    bandwidth: float | None = None
    queue_depth = 0
    detail = "copies in memory of the process"

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.counters = TierCounters()
        self.is_started = False
        self.is_closed = False
        self.is_forgetful = False
        self._copies: dict[Region, _Copy] = {}

    @property
    def used_bytes(self) -> int:
        return sum(region.nbytes for region in self._copies)

    def start(self) -> None:
        self.is_started = True

    async def close(self) -> None:
        self.is_closed = True

    def begin(self, region: Region, instead_of: Region | None, next_use: float) -> bool:
        if region not in self._copies:
            if self.used_bytes + region.nbytes > self.budget_bytes:
                return False
            self._copies[region] = _Copy(bytearray(region.nbytes))
        return True

    def forget(self, region: Region) -> None:
        self._copies.pop(region, None)

    def has(self, region: Region) -> bool:
        return self._owns(Move(region, 0, memoryview(bytes(region.nbytes))))

    def split(
        self, moves: Sequence[Move[Region]], durable: TierCounters
    ) -> tuple[Sequence[Move[Region]], Sequence[MemoryRead]]:
        reads = [MemoryRead(move, self._copies[move.region].data) for move in moves if self._owns(move)]
        return [move for move in moves if not self._owns(move)], reads

    async def read(self, reads: Sequence[MemoryRead], *, verified: bool) -> Sequence[Move[Region]]:
        if self.is_forgetful:
            return [read.move for read in reads]
        for (region, offset, buffer), data in reads:
            buffer[:] = data[offset : offset + len(buffer)]
            if verified:
                region.verify(offset, buffer)
        self.counters.hits += len(reads)
        return []

    async def push(self, moves: Sequence[Move[Region]]) -> None:
        for move in moves:
            if (copy := self._copies.get(move.region)) is not None:
                copy.data[move.offset : move.offset + len(move.buffer)] = move.buffer
                copy.blocks.update(_blocks(move))

    def patience(self, moves: Sequence[Move[Region]]) -> float:
        return 0.0

    def _owns(self, move: Move[Region]) -> bool:
        return move.region in self._copies and self._copies[move.region].blocks.issuperset(_blocks(move))


def _blocks(move: Move[Region]) -> range:
    return range(move.offset // BLOCK_BYTES, -(-(move.offset + len(move.buffer)) // BLOCK_BYTES))
