"""A third tier, which only the tests have: one file for each version, in a folder, under a byte budget.

It fulfils `BackingTier` and is not durable. Engines are given it by the name of the GPU tier, which the product does
not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.base.errors import BudgetExceededError, NotFoundError
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import TierName
from storage.tiers.base import TierCounters, round_up
from storage.tiers.contract import Move
from storage.tiers.health import Device
from storage.tiers.io_engine import Priority


@dataclass(slots=True, eq=False)
class FolderRegion:
    """One file."""

    tier: FolderTier
    path: Path
    label: str
    nbytes: int
    block_bytes: int
    holders: int = 1
    doubtful: bool = False

    def verify(self, offset: int, buffer: memoryview) -> None:
        """Accept the bytes, because the tier keeps no checksums."""

    def record(self, offset: int, buffer: memoryview) -> None:
        """Note nothing, because the tier keeps no checksums."""


class FolderTier:
    """Files in a folder."""

    name = TierName.GPU
    is_durable = False
    problems: Sequence[str] = ()
    devices: Sequence[Device] = ()
    bandwidth: float | None = None

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        folder.mkdir(parents=True)
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.queue_depth = 0
        self.counters = TierCounters()
        self.is_closed = False
        self._folder = folder
        self._numbers = itertools.count()
        self._new: set[FolderRegion] = set()

    @property
    def detail(self) -> str:
        return f"files in {self._folder}"

    @property
    def new_regions(self) -> Collection[FolderRegion]:
        return self._new

    def reserve(self, nbytes: int) -> None:
        if self.used_bytes + round_up(nbytes) > self.budget_bytes:
            raise BudgetExceededError(f"gpu_budget {self.budget_bytes} is too small: {self.used_bytes} are used")

    async def allocate(self, nbytes: int, label: str = "scratch", block_bytes: int = BLOCK_BYTES) -> FolderRegion:
        self.reserve(nbytes)
        self.used_bytes += round_up(nbytes)
        self.counters.moved_bytes += round_up(nbytes)
        path = self._folder / str(next(self._numbers))
        path.write_bytes(b"")
        return FolderRegion(self, path, label, round_up(nbytes), block_bytes)

    @contextlib.asynccontextmanager
    async def new_version(self, nbytes: int, label: str, block_bytes: int = BLOCK_BYTES) -> AsyncIterator[FolderRegion]:
        region = await self.allocate(nbytes, label, block_bytes)
        self._new.add(region)
        try:
            yield region
        except BaseException:
            self.free(region)
            raise
        finally:
            self._new.discard(region)

    def hold(self, *regions: FolderRegion) -> None:
        if not all(region.holders for region in regions):
            raise NotFoundError("a region is not stored any more")
        for region in regions:
            region.holders += 1

    def free(self, region: FolderRegion) -> None:
        region.holders -= 1
        if not region.holders:
            self.used_bytes -= region.nbytes
            self.counters.moved_bytes += region.nbytes
            region.path.unlink()

    async def read_into(
        self, region: FolderRegion, offset: int, buffer: memoryview, priority: Priority = Priority.DEMAND
    ) -> None:
        await self.read_many([Move(region, offset, buffer)], priority)

    async def write_from(
        self, region: FolderRegion, offset: int, buffer: memoryview, priority: Priority = Priority.UPDATE
    ) -> None:
        await self.write_raw([Move(region, offset, buffer)], priority)

    async def read_many(self, moves: Sequence[Move[FolderRegion]], priority: Priority) -> None:
        await self._move(moves, write=False)
        self.counters.bytes_read += sum(len(move.buffer) for move in moves)

    async def read_raw(self, moves: Sequence[Move[FolderRegion]], priority: Priority) -> None:
        await self.read_many(moves, priority)

    async def write_raw(self, moves: Sequence[Move[FolderRegion]], priority: Priority) -> None:
        await self._move(moves, write=True)
        self.counters.bytes_written += sum(len(move.buffer) for move in moves)

    async def close(self) -> None:
        assert not self.queue_depth
        self.is_closed = True

    async def _move(self, moves: Sequence[Move[FolderRegion]], *, write: bool) -> None:
        self.hold(*(move.region for move in moves))
        self.queue_depth += len(moves)
        moving = asyncio.ensure_future(asyncio.to_thread(_move_all, moves, write))
        try:
            await asyncio.shield(moving)
        finally:
            # The buffers are in use until the thread is done, also where the caller is cancelled.
            await asyncio.wait([moving])
            self.queue_depth -= len(moves)
            for move in moves:
                self.free(move.region)


def _move_all(moves: Sequence[Move[FolderRegion]], write: bool) -> None:
    for region, offset, buffer in moves:
        fd = os.open(region.path, os.O_RDWR)
        try:
            moved = os.pwrite(fd, buffer, offset) if write else os.preadv(fd, [buffer], offset)
            assert moved == len(buffer)
        finally:
            os.close(fd)
