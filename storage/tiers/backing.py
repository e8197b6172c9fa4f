"""The backing tiers of one engine, which find the tier of a region and the tier for a slab's versions.

This module owns the watch over the tiers' devices, and closes the tiers. It must not copy the bytes of a move. If a
copy tier has a copy of a region's bytes, that tier decides which reads go to the copy.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import TierName
from storage.base.waiting import finish_all, wait_out
from storage.tiers.contract import BackingTier, CopyRead, CopyTier, DurableTier, Move, Region, Tier
from storage.tiers.health import DeviceWatch
from storage.tiers.io_engine import Priority

# The bytes of the buffer through which a region is copied from one tier to another.
_COPY_BYTES = 4 << 20


class BackingTiers:
    """The backing tiers of one engine, fastest first; the last one is the durable one.

    Attributes:
        copies: the tiers that have copies of versions on the durable tier, fastest first.
    """

    def __init__(
        self,
        volatile: Sequence[BackingTier[Any]],
        durable: DurableTier[Any],
        watch: DeviceWatch,
        copies: Sequence[CopyTier[Any]] = (),
    ) -> None:
        """Take over the tiers and the watch, which watches their devices from here on.

        Args:
            volatile: the tiers whose bytes a restart loses, fastest first.
            durable: the durable tier.
            watch: the watch.
            copies: the tiers that have copies of versions on the durable tier, fastest first.

        Raises:
            ValueError: two tiers have the same name, or one has the host tier's name, or a tier in `volatile` is
                durable.
        """
        self.durable = durable
        self.watch = watch
        self.copies = tuple(copies)
        self._tiers: dict[TierName, BackingTier[Any]] = {tier.name: tier for tier in (*volatile, durable)}
        names = [TierName.HOST, *(tier.name for tier in (*copies, *volatile, durable))]
        if len(set(names)) < len(names):
            raise ValueError(f"each tier has a name of its own: {names}")
        if not durable.is_durable or any(tier.is_durable for tier in volatile):
            raise ValueError("the durable tier, and no other one, says that it is durable")
        for tier in self:
            watch.follow(tier.devices)

    def __iter__(self) -> Iterator[BackingTier[Any]]:
        return iter(self._tiers.values())

    def __contains__(self, name: TierName) -> bool:
        return name in self._tiers

    def problems_of(self, tier: Tier) -> list[str]:
        """Return the reasons why a tier is degraded, its stuck devices first, for operators; empty if none."""
        return [*self.device_problems_of(tier), *tier.problems]

    def device_problems_of(self, tier: Tier) -> list[str]:
        """Return one line for each stuck device of a tier. It names no job, so that any client may read it."""
        backing = self._tiers.get(tier.name)
        return [] if backing is None else self.watch.problems_of(backing.devices)

    def home_of(self, placement: TierName, *, every_commit_is_durable: bool) -> TierName | None:
        """Return the tier that every version of a slab is written to; None if only the host copy has the bytes.

        If every commit is durable, versions of slabs of any placement go to the durable tier at once. Versions also go
        to the durable tier if this engine has no tier of the placement's name, because the job was stored by an engine
        that had such a tier.
        """
        if every_commit_is_durable:
            return self.durable.name
        if placement is TierName.HOST:
            return None
        return placement if placement in self._tiers else self.durable.name

    def new_version(
        self, home: TierName, nbytes: int, label: str, block_bytes: int = BLOCK_BYTES
    ) -> AbstractAsyncContextManager[Region]:
        """Allocate a region of the tier `home`, which the body of the `with` block fills.

        See `BackingTier.new_version`.
        """
        return self._tiers[home].new_version(nbytes, label, block_bytes)

    def hold(self, region: Region) -> None:
        """Keep a region's bytes until `free` was called once more for it; see `BackingTier.hold`."""
        region.tier.hold(region)

    def free(self, region: Region) -> None:
        """Release a region; see `BackingTier.free`."""
        region.tier.free(region)

    # `read_into`, `read_many`, `read_raw` and `write_raw` are no coroutine functions, so that the caller awaits the
    # tier's own coroutine directly.

    def read_into(
        self, region: Region, offset: int, buffer: memoryview, priority: Priority = Priority.DEMAND
    ) -> Coroutine[Any, Any, None]:
        """Fill `buffer`, verified, from the region's tier or from a copy; see `BackingTier.read_into`."""
        if self.copies:
            return self._read_with_copies(self.copies, [Move(region, offset, buffer)], priority, verified=True)
        return region.tier.read_into(region, offset, buffer, priority)

    def read_many(self, moves: Sequence[Move[Region]], priority: Priority) -> Coroutine[Any, Any, None]:
        """Fill the buffers, verified, from the tiers of their regions or from copies; see `BackingTier.read_many`."""
        if self.copies:
            return self._read_with_copies(self.copies, moves, priority, verified=True)
        return self._read(moves, priority, verified=True)

    def read_raw(self, moves: Sequence[Move[Region]], priority: Priority) -> Coroutine[Any, Any, None]:
        """Fill the buffers, unverified, from the tiers of their regions or from copies; see `BackingTier.read_raw`."""
        if self.copies:
            return self._read_with_copies(self.copies, moves, priority, verified=False)
        return self._read(moves, priority, verified=False)

    def write_raw(self, moves: Sequence[Move[Region]], priority: Priority) -> Coroutine[Any, Any, None]:
        """Write the buffers to the tiers of their regions, and to copy tiers that have room for them.

        See `BackingTier.write_raw`, and `begin_copy` for the copies.
        """
        if self.copies:
            return self._write_with_copies(moves, priority)
        return self._write(moves, priority)

    def begin_copy(self, region: Region, instead_of: Region | None, next_use: float) -> bool:
        """Prepare a copy of a version on the fastest copy tier that has room for it; see `CopyTier.begin`.

        If a tier has room, or has all bytes already, return True; `write_raw` sends the bytes to this tier, too, from
        then on.
        """
        return region.tier is self.durable and (
            self.has_copy(region) or any(tier.begin(region, instead_of, next_use) for tier in self.copies)
        )

    def has_copy(self, region: Region) -> bool:
        """Return whether a copy tier has all bytes of a version."""
        return any(tier.has(region) for tier in self.copies)

    async def send_copy(self, region: Region, view: memoryview) -> None:
        """Send all bytes of a version to the tier on which `begin_copy` made room. `view` must not change."""
        for tier in self.copies:
            await tier.push([Move(region, 0, view)])

    def _read(self, moves: Sequence[Move[Region]], priority: Priority, *, verified: bool) -> Coroutine[Any, Any, None]:
        if (tier := self._only_tier_of(moves)) is not None:
            return tier.read_many(moves, priority) if verified else tier.read_raw(moves, priority)
        parts = list(self._by_tier(moves))
        return _each([t.read_many(part, priority) if verified else t.read_raw(part, priority) for t, part in parts])

    def _write(self, moves: Sequence[Move[Region]], priority: Priority) -> Coroutine[Any, Any, None]:
        if (tier := self._only_tier_of(moves)) is not None:
            return tier.write_raw(moves, priority)
        return _each([tier.write_raw(part, priority) for tier, part in self._by_tier(moves)])

    async def _read_with_copies(
        self, copies: Sequence[CopyTier[Any]], moves: Sequence[Move[Region]], priority: Priority, *, verified: bool
    ) -> None:
        """Read from each of the copy tiers what it has, and at the same time the rest from the tiers of the regions."""
        if not copies:
            await self._read(moves, priority, verified=verified)
            return
        tier, *slower = copies
        elsewhere, reads = tier.split(moves, self.durable.counters)
        if not reads:
            await self._read_with_copies(slower, moves, priority, verified=verified)
            return
        for read in reads:
            self.hold(read.move.region)
        try:
            parts = [self._read_copies(tier, reads, slower, priority, verified=verified)]
            if elsewhere:
                parts.append(self._read_with_copies(slower, elsewhere, priority, verified=verified))
            await _each(parts)
        finally:
            for read in reads:
                self.free(read.move.region)

    async def _read_copies(
        self,
        tier: CopyTier[Any],
        reads: Sequence[CopyRead],
        slower: Sequence[CopyTier[Any]],
        priority: Priority,
        *,
        verified: bool,
    ) -> None:
        """Read the copies of a tier, and what the tier has lost from the slower ones or the tiers of the regions."""
        if left := await tier.read(reads, verified=verified):
            await self._read_with_copies(slower, left, priority, verified=verified)

    async def _write_with_copies(self, moves: Sequence[Move[Region]], priority: Priority) -> None:
        """Write to the tiers of the regions, and push the same bytes to the copy tiers; see `CopyTier.patience`."""
        pushes = {asyncio.ensure_future(tier.push(moves)): tier for tier in self.copies}
        try:
            await self._write(moves, priority)
            if late := [push for push in pushes if not push.done()]:
                await asyncio.wait(late, timeout=max(pushes[push].patience(moves) for push in late))
        finally:
            for push in pushes:
                push.cancel()
            await wait_out(pushes)

    async def copy_to_durable(self, region: Region, view: memoryview | None = None) -> Region:
        """Write the bytes of a region to a new region of the durable tier, and return the new one.

        Args:
            region: the region.
            view: its bytes, which must not change meanwhile. None: they are read from a copy, or from the region, and
                verified.

        Raises:
            DamagedBlockError: the bytes of the region are damaged.
            DeviceError, BudgetExceededError: the bytes cannot be read, or cannot be written to another place.
        """
        block = region.block_bytes
        new: AbstractAsyncContextManager[Region] = self.durable.new_version(region.nbytes, region.label, block)
        async with new as copy:
            if view is not None:
                await self.durable.write_from(copy, 0, view)
                return copy
            at_once = _COPY_BYTES // block * block
            buffer = memoryview(mmap.mmap(-1, min(at_once, region.nbytes)))
            for offset in range(0, region.nbytes, at_once):
                piece = buffer[: min(at_once, region.nbytes - offset)]
                await self.read_into(region, offset, piece, Priority.UPDATE)
                await self.durable.write_from(copy, offset, piece)
        return copy

    async def close(self) -> None:
        """Stop the watch, then close all tiers."""
        await self.watch.close()
        for tier in (*self.copies, *self):
            await tier.close()

    def _only_tier_of(self, moves: Sequence[Move[Region]]) -> BackingTier[Any] | None:
        """Return the tier to which all moves belong; None if they belong to several tiers."""
        if len(self._tiers) == 1:
            return self.durable
        first = moves[0].region.tier if moves else self.durable
        return first if all(move.region.tier is first for move in moves) else None

    def _by_tier(self, moves: Sequence[Move[Region]]) -> Iterator[tuple[BackingTier[Any], list[Move[Region]]]]:
        for tier in self:
            if part := [move for move in moves if move.region.tier is tier]:
                yield tier, part


async def _each(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    await finish_all([asyncio.ensure_future(work) for work in works])
