"""The passage of a group's slabs through a kernel, tile by tile, so that reads, work and writes overlap.

This module owns the tile buffers. It must never overwrite the bytes of a committed version on NVMe, so results go to
new extents.

An optimizer update is such a passage. If a slab has a copy in the host tier, the kernel works on the copy in place. A
slab without a copy passes through tile buffers, so that the memory needed does not depend on the size of the group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from storage.base.codec import PLAIN, TILE_QUANTUM, EncodedLayout, layout_of
from storage.base.errors import BudgetExceededError
from storage.base.position_lock import PositionLock
from storage.base.shard import MAX_OPTIMIZER_STATES, Kind
from storage.base.shown_sizes import least_size, shown_size
from storage.base.waiting import finish_all
from storage.memory.gradients import Gradients
from storage.memory.host_cache import HostCache
from storage.memory.parkable import Gradient
from storage.state.slab import NEVER, Group, HostCopy, Slab
from storage.steps.tile import (
    MAX_TILE_ELEMENTS,
    EncodedSlab,
    Kernel,
    Mapped,
    MappedSlab,
    Parts,
    Passage,
    Scratch,
    pages_of,
)
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.base import round_up
from storage.tiers.contract import Region
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority

# The bytes that a tile's buffer has for each element: the master weight and the optimizer states are fp32 or encoded in
# fewer bytes, and the parameter has 16 bits.
BYTES_PER_TILE_ELEMENT = 4 * (1 + MAX_OPTIMIZER_STATES) + 2
# The number of tile buffers. While one is filled by reads, the kernel works on another one, and two are written to
# NVMe. The smallest host budgets have only two.
TILE_SETS = 4
LEAST_TILE_SETS = 2
# The buffers of tiles take 1 / TILE_BUDGET_FRACTION of the host budget, but at least LEAST_TILE_BYTES and at most
# MOST_TILE_BYTES.
TILE_BUDGET_FRACTION = 8
LEAST_TILE_BYTES = LEAST_TILE_SETS * TILE_QUANTUM * BYTES_PER_TILE_ELEMENT
MOST_TILE_BYTES = TILE_SETS * MAX_TILE_ELEMENTS * BYTES_PER_TILE_ELEMENT


def tile_buffer_bytes(host_budget: int) -> int:
    """Return the bytes of all tile buffers of an engine with that host budget."""
    sets, elements = _cut_buffers(host_budget)
    return sets * round_up(elements * BYTES_PER_TILE_ELEMENT)


def _cut_buffers(host_budget: int) -> tuple[int, int]:
    """Return the number of tile buffers of an engine with that host budget, and the elements of each."""
    room = max(LEAST_TILE_BYTES, min(host_budget // TILE_BUDGET_FRACTION, MOST_TILE_BYTES))
    quanta = room // BYTES_PER_TILE_ELEMENT // TILE_QUANTUM
    sets = min(quanta, TILE_SETS)
    return sets, quanta // sets * TILE_QUANTUM


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The description of one update: which group the kernel changes, with which gradient, to which version.

    Attributes:
        step: the version that each slab gets.
        reads: the kinds whose old bytes the kernel needs.
        position: the trace position at which the group is needed next. A group with a lower position goes first, also
            between two tiles of this group.
    """

    group: Group
    step: int
    reads: frozenset[Kind]
    gradient: Gradient
    kernel: Kernel
    position: float


def host_budget_for(other_bytes: int) -> int:
    """Return the smallest host budget that has room for `other_bytes` and for the tile buffers, which grow with it."""
    share = -(-other_bytes // (TILE_BUDGET_FRACTION - 1))
    return round_up(max(2 * LEAST_TILE_BYTES, other_bytes + max(LEAST_TILE_BYTES, min(share, MOST_TILE_BYTES))))


class TilePool:
    """Lends out the tile buffers: pages of the arena of equal size. One update tile or one read uses each at a time."""

    def __init__(self, host: HostTier) -> None:
        """Allocate the buffers in an eighth of the host budget, but in at least LEAST_TILE_BYTES.

        Raises:
            BudgetExceededError: the budget is too small for the smallest tiles.
        """
        if host.budget_bytes < 2 * LEAST_TILE_BYTES:
            raise BudgetExceededError(
                f"host_budget {shown_size(host.budget_bytes)} is too small to run an optimizer; raise it to at least "
                f"{least_size(2 * LEAST_TILE_BYTES)}"
            )
        self._host = host
        self._sets, self.elements = _cut_buffers(host.budget_bytes)
        self._free: asyncio.Queue[ArenaRange] = asyncio.Queue()
        self._taking_two = asyncio.Lock()
        for _ in range(self._sets):
            range_ = host.arena.allocate(self.elements * BYTES_PER_TILE_ELEMENT)
            assert range_ is not None
            self._free.put_nowait(range_)

    @property
    def nbytes(self) -> int:
        """The bytes of the arena that all tile buffers take."""
        return tile_buffer_bytes(self._host.budget_bytes)

    async def take(self) -> ArenaRange:
        """Wait until a buffer is free, and return it. The caller passes it to `free` afterwards."""
        return await self._free.get()

    async def take_two(self) -> tuple[ArenaRange, ArenaRange]:
        """Wait until two buffers are free, and return them. The caller passes each to `free` afterwards."""
        # Only one task at a time takes two buffers, so that two tasks with one buffer each never wait for each other.
        async with self._taking_two:
            first = await self._free.get()
            try:
                return first, await self._free.get()
            except BaseException:
                self.free(first)
                raise

    def free(self, range_: ArenaRange) -> None:
        """Give back a buffer of `take` or `take_two`, so that another tile or read can take it."""
        self._free.put_nowait(range_)

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[memoryview]:
        """Yield one buffer, as plain bytes, for the length of a `with` block."""
        range_ = await self.take()
        try:
            yield self._host.view(range_)
        finally:
            self.free(range_)


class Transformer:
    """Runs kernels over groups, several tiles at once. The waiting group with the lowest position goes first."""

    def __init__(
        self,
        host: HostTier,
        backing: BackingTiers,
        host_cache: HostCache,
        gradients: Gradients,
        tiles: TilePool,
        executor: Executor,
        threads: int,
    ) -> None:
        """Make a transformer whose kernels run in `executor`; `threads` is the number of its threads."""
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._gradients = gradients
        self._tiles = tiles
        self._executor = executor
        # Tiles whose bytes are all in host memory need no buffers, so this semaphore limits their number. So many of
        # them are under way at once that each thread finds another tile when it has done one.
        self._in_memory = asyncio.Semaphore(2 * threads)
        self._position_lock = PositionLock()
        self._scratch = Scratch()

    async def run(self, work: Work) -> None:
        """Give every slab of the group a new version.

        On an error the slabs keep their old versions, but a host copy that the kernel worked on loses its bytes, even
        if they were nowhere else. The copy keeps them if the error came before the kernel was called.

        Raises:
            BudgetExceededError: there is no room for the new versions.
            DeviceError: a read or a write failed.
        """
        async with AsyncExitStack() as undo:
            # The update waits for the readers of its slabs before it takes the position lock, because readers may use
            # the slabs for a long time, and updates of other groups must not wait for them.
            for slab in work.group.slabs:
                await self._idle(slab)
            passages: list[Passage] = []
            tasks: list[asyncio.Task[None]] = []
            try:
                async with self._position_lock.at(work.position) as give_way:
                    passages = [await self._open_passage(slab, work, undo) for slab in work.group.slabs]
                    for start in range(0, work.group.spec.numel, self._tiles.elements):
                        await give_way(partial(self._make_evictable, passages, tasks))
                        self._pin_again(passages)
                        tasks.append(await self._begin_tile(work, start, passages))
            finally:
                await finish_all(tasks)
            for passage in passages:
                self._finish(passage, work.step)

    async def run_aside(self, work: Work, copies: Mapping[Slab, HostCopy], is_late: Callable[[], bool]) -> bool:
        """Write the bytes that `run` would give to each slab to another copy of it, and leave the slabs as they are.

        This gives way to no other group between its tiles, so that at most the tiles of one or two groups are under way
        when the work becomes late.

        Args:
            copies: the copy to write for each slab of the group. The newest bytes of the slabs are in host memory.
            is_late: called when this work has the position lock; if it returns True, nothing is written.

        Returns:
            Whether the copies were written.
        """
        with ExitStack() as undo:
            passages = []
            for slab, copy in copies.items():
                reads = slab.key.kind in work.reads
                before = slab.copy if reads and slab.latest is not None else None
                if before is not None:
                    self._host_cache.pin(before)
                    undo.callback(self._host_cache.unpin, slab, before, before.next_use)
                copy.next_use = work.position if slab.key.kind is Kind.PARAM else NEVER
                passages.append(Passage(slab=slab, reads=reads, copy=copy, source=None, target=None, before=before))

            tasks: list[asyncio.Task[None]] = []
            try:
                async with self._position_lock.at(work.position):
                    if is_late():
                        return False
                    for start in range(0, work.group.spec.numel, self._tiles.elements):
                        tasks.append(await self._begin_tile(work, start, passages))
            finally:
                await finish_all(tasks)
        return True

    async def _begin_tile(self, work: Work, start: int, passages: Sequence[Passage]) -> asyncio.Task[None]:
        buffers = await self._take_buffers(work.gradient, in_memory=_are_in_memory(passages))
        return asyncio.ensure_future(self._tile(buffers, work.group, start, passages, work.kernel))

    async def _open_passage(self, slab: Slab, work: Work, undo: AsyncExitStack) -> Passage:
        """Choose the slab's copy or new extents to work on, and register in `undo` how to release them."""
        await self._idle(slab)
        step, position = work.step, work.position
        reads = slab.key.kind in work.reads
        copy = self._copy_to_work_on(slab, position if slab.key.kind is Kind.PARAM else NEVER)
        passage = Passage(slab=slab, reads=reads, copy=copy, source=None, target=None)
        undo.callback(self._release_source, passage)
        is_newest = copy is not None and copy.step == slab.latest
        if copy is not None:
            passage.kept_step = copy.step if is_newest else None
            self._host_cache.pin_to_write(copy)
            undo.callback(self._release_copy, passage)
        if not is_newest:
            self._hold_source(passage)
        if slab.backing is not None:
            new = self._backing.new_version(slab.backing, slab.nbytes, slab.label(step), slab.layout.block_bytes)
            passage.target = await undo.enter_async_context(new)
            undo.enter_context(slab.filling(passage.target))
            if not slab.at_home_in_host:
                before = None if slab.latest is None else slab.versions.get(slab.latest)
                self._backing.begin_copy(passage.target, before, position if slab.key.kind is Kind.PARAM else NEVER)
        return passage

    async def _make_evictable(self, passages: Sequence[Passage], tasks: Sequence[asyncio.Task[None]]) -> None:
        """Make the copies of a waiting group evictable, after its tiles under way are done.

        Many groups may wait for a group that is needed sooner, and their copies would fill the host tier. The bytes of
        these copies are on NVMe, too: of each tile, either the old bytes or the new ones. Copies at home are never
        evicted, so a group that has only such copies does not wait for its tiles.
        """
        away = [passage for passage in passages if passage.copy is not None and not passage.copy.at_home]
        if away and tasks:
            await asyncio.wait(tasks)
        for passage in away:
            assert passage.copy is not None
            self._host_cache.make_evictable(passage.slab, passage.copy)
            passage.evictable = True

    def _pin_again(self, passages: Sequence[Passage]) -> None:
        """Pin the copies again that were evictable and are still there.

        The slabs whose copies were evicted pass through tile buffers from here on.
        """
        for passage in passages:
            if passage.evictable:
                passage.evictable = False
                if passage.copy is not None and passage.slab.copy is passage.copy:
                    self._host_cache.pin(passage.copy)
                else:
                    passage.copy = None
                    self._hold_source(passage)

    def _hold_source(self, passage: Passage) -> None:
        """Find and hold the region of the slab's old bytes, if the kernel needs them and there are any.

        The region must be held because a snapshot that runs beside the update may replace a volatile region of this
        version by a durable one, and free the volatile one.
        """
        slab = passage.slab
        if passage.source is None and passage.reads and slab.latest is not None:
            passage.source = slab.source(slab.latest)
            self._backing.hold(passage.source)

    def _release_source(self, passage: Passage) -> None:
        """Release the region that `_hold_source` has held, if there is one."""
        if passage.source is not None:
            self._backing.free(passage.source)

    def _release_copy(self, passage: Passage) -> None:
        """Release the copy of an update that failed. A finished passage has no copy left to release."""
        self._pin_again([passage])
        if passage.copy is not None:
            passage.copy.step = passage.kept_step
            self._host_cache.unpin(passage.slab, passage.copy)

    def _copy_to_work_on(self, slab: Slab, next_use: float) -> HostCopy | None:
        """Return the slab's copy, or a new one if there is room; None if the slab must pass through tile buffers.

        A new copy evicts only copies that are needed later than `next_use`, and saves the next read of the slab. If
        readers have pinned a copy that is not at home, the update does not use it. Optimizer states have no next use,
        because each update needs all of them once. So no copy of a state is evicted for a copy of another state.
        """
        copy = slab.copy
        if copy is None and (range_ := self._host.try_allocate(slab.nbytes, next_use)) is not None:
            copy = slab.copy = HostCopy(range_, step=None, at_home=slab.at_home_in_host)
        elif copy is None or copy.pins or (copy.step is None and not copy.at_home):
            return None
        copy.next_use = next_use
        return copy

    async def _idle(self, slab: Slab) -> None:
        """Wait until no snapshot needs the slab's bytes and, if its copy is at home, no reader has pinned the copy."""
        while True:
            if slab.copy_write is not None:
                await slab.unclaimed()
            elif slab.copy is not None and slab.copy.at_home and slab.copy.pins:
                await slab.copy.idle.wait()
            else:
                return

    async def _take_buffers(self, gradient: Gradient, *, in_memory: bool) -> _Buffers:
        """Wait for the buffers of a tile, and keep the gradient from being moved until the tile is done.

        For a spilled gradient, a second buffer is taken, into which the gradient's part of the tile is read.

        Args:
            in_memory: the bytes of all slabs are in host memory, and their results stay there, so that the slabs need
                no buffer.
        """
        of_slabs: ArenaRange | None = None
        of_gradient: ArenaRange | None = None
        if in_memory:
            await self._in_memory.acquire()
            if not gradient.is_in_arena:
                try:
                    of_gradient = await self._tiles.take()
                except BaseException:
                    self._in_memory.release()
                    raise
        elif gradient.is_in_arena:
            of_slabs = await self._tiles.take()
            if not gradient.is_in_arena:
                # The gradient was spilled while this tile waited for a buffer, so the tile needs a second buffer, into
                # which the gradient is read.
                self._tiles.free(of_slabs)
                of_slabs, of_gradient = await self._tiles.take_two()
        else:
            of_slabs, of_gradient = await self._tiles.take_two()
        return _Buffers(of_slabs, of_gradient, gradient, self._gradients.begin_read(gradient))

    async def _tile(
        self, buffers: _Buffers, group: Group, start: int, passages: Sequence[Passage], kernel: Kernel
    ) -> None:
        """Read, update and write one tile, and free its buffers."""
        try:
            numel = min(self._tiles.elements, group.spec.numel - start)
            gradient = self._map_gradient(buffers, start, numel)
            mapped = self._map(buffers.of_slabs, start, numel, passages)
            parts = Parts(start, numel, mapped, gradient, kernel, self._scratch)
            await self._backing.read_raw(parts.reads(0, numel), Priority.UPDATE)
            loop, done = asyncio.get_running_loop(), 0
            while (done := await loop.run_in_executor(self._executor, parts.work, done)) < numel:
                # A part of the tile does not match its checksums. The transfer may have corrupted the bytes while those
                # on the disk are right, so the part is read once more before the tier reports it as damaged.
                await self._backing.read_many(parts.reads(done, parts.end_of(done)), Priority.UPDATE)
            await self._backing.write_raw(parts.writes(), Priority.UPDATE)
        finally:
            self._gradients.end_read(buffers.gradient, buffers.place)
            if buffers.of_slabs is None:
                self._in_memory.release()
            for range_ in (buffers.of_slabs, buffers.of_gradient):
                if range_ is not None:
                    self._tiles.free(range_)

    def _map_gradient(self, buffers: _Buffers, start: int, numel: int) -> Mapped:
        """Return the memory of the gradient's part of the tile.

        It is a part of the gradient's range in the arena. If the gradient is spilled, it is the tile's buffer for
        gradients, into which the part is read from the gradient's region.
        """
        gradient, place = buffers.gradient, buffers.place
        layout = layout_of(PLAIN, gradient.numel, gradient.dtype.itemsize)
        span = pages_of(layout.bytes_of(start, start + numel))
        if isinstance(place, ArenaRange):
            return Mapped(self._host.view(place)[span], start, gradient.dtype, layout)
        assert buffers.of_gradient is not None, "a spilled gradient has a buffer of its own"
        view = self._host.view(buffers.of_gradient)[: span.stop - span.start]
        return Mapped(view, start, gradient.dtype, layout, source=place)

    def _map(self, range_: ArenaRange | None, start: int, numel: int, passages: Sequence[Passage]) -> list[MappedSlab]:
        """Return the memory of each slab's part of the tile, which is in the slab's copy or in the tile's buffer."""
        mapped: list[MappedSlab] = []
        used = 0
        for passage in passages:
            layout = passage.slab.layout
            span = pages_of(layout.bytes_of(start, start + numel))
            if passage.copy is not None:
                view = self._host.view(passage.copy.arena_range)[span]
            else:
                assert range_ is not None, "a slab without a copy has a place in the buffer"
                view = self._host.view(range_)[used : used + span.stop - span.start]
                used += span.stop - span.start
            before = None if passage.before is None else self._host.view(passage.before.arena_range)[span]
            mapped_slab = EncodedSlab if isinstance(layout, EncodedLayout) else MappedSlab
            mapped.append(mapped_slab(passage, view, start, before))
        return mapped

    def _finish(self, passage: Passage, step: int) -> None:
        """Make the bytes that the kernel has written the slab's newest version, that of `step`."""
        slab = passage.slab
        slab.latest = step
        slab.updated_at = time.monotonic()
        if passage.target is not None:
            slab.add_version(step, passage.target)
        copy, passage.copy = passage.copy, None
        if slab.copy is not copy:
            # The slab's present copy was fetched by readers while the update ran. It holds the old version, so it is
            # taken away from the slab.
            self._host_cache.free_copy(slab)
        if copy is not None:
            copy.step = step
            self._host_cache.unpin(slab, copy, copy.next_use)


def _are_in_memory(passages: Sequence[Passage]) -> bool:
    """Return whether the old bytes of all slabs are in host memory, and the new bytes stay there.

    The result does not change while a group is updated.
    """
    return all(one.copy is not None and one.copy.at_home and one.target is None for one in passages)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The buffers of one tile.

    Attributes:
        of_slabs: the buffer for the parts of slabs that have no copy; None if all bytes are in host memory.
        of_gradient: the buffer for the part of the gradient; None if the gradient is in the arena.
        gradient: the gradient.
        place: the range or the region that has the gradient, as `Gradients.begin_read` returned it.
    """

    of_slabs: ArenaRange | None
    of_gradient: ArenaRange | None
    gradient: Gradient
    place: ArenaRange | Region
