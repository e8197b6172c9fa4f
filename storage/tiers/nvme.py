"""The NVMe tier: one preallocated data file in each directory, if possible on different devices, and regions in them.

This module owns the files, the budget over all of them, and the list of damaged extents. A region is a list of extents
of the files. Bytes are spread over the devices in proportion to their measured speed. This module must never give out
bytes that are not verified, except to a caller of `read_raw`, which verifies them itself while they are in the
processor's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from storage.base.errors import BudgetExceededError, DamagedBlockError, DiskFullError, NotFoundError
from storage.base.integrity import BLOCK_BYTES, Checksums
from storage.base.shard import TierName
from storage.base.shown_sizes import least_size, shown_size
from storage.base.tracing import Activity, Tracer
from storage.base.waiting import finish_all
from storage.tiers.base import PAGE_BYTES, TierCounters, round_up
from storage.tiers.contract import Move
from storage.tiers.data_file import GROWTH_BYTES, DataFile
from storage.tiers.extents import SPLIT_BYTES, Extent, overlapping, without
from storage.tiers.io_engine import IoRequest, Priority

log = logging.getLogger(__name__)

# The most damaged versions that `problems` names one by one.
MOST_NAMED = 5
# The bytes of one request to a device, and of one stripe of a region that is spread over several devices.
REQUEST_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class NvmeRegion:
    """The region of one version: the extents that have its bytes, in order, their checksums, and its holders."""

    tier: NvmeTier
    extents: tuple[Extent, ...]
    checksums: Checksums
    # The number of holders: the slab, readers and moves under way. When the last one calls `free`, the extents are
    # freed.
    holders: int = 1
    # The number of writes to the region that are under way, and of all that have begun. A sync compares them to find
    # the regions that it has covered.
    writers: int = 0
    writes: int = 0
    # True if a sync after a write to the region failed. The region's bytes may or may not be on the device, and no
    # later sync can tell.
    doubtful: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the region in bytes: the sum of its extents, in whole pages."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def block_bytes(self) -> int:
        """The bytes that one checksum covers."""
        return self.checksums.block_bytes

    @property
    def blocks_are_whole(self) -> bool:
        """Whether every checksum block lies in one extent, so that each request can be verified by itself.

        If there was free space in short pieces only, a block may lie in several extents.
        """
        return all(extent.nbytes % self.block_bytes == 0 for extent in self.extents[:-1])

    @property
    def label(self) -> str:
        """The name of the version that the region holds, as `Slab.label` gives it."""
        return self.checksums.label

    def verify(self, offset: int, buffer: memoryview) -> None:
        """Check bytes that were read; see `Checksums.verify`."""
        self.checksums.verify(offset, buffer)

    def record(self, offset: int, buffer: memoryview) -> None:
        """Compute and keep the checksums of bytes that are about to be written; see `Checksums.record`."""
        self.checksums.record(offset, buffer)


OnDamage = Callable[[DamagedBlockError, Sequence[Extent]], None]


class NvmeTier:
    """The durable tier of an engine: it keeps versions as extents of its data files, under one common budget."""

    name = TierName.NVME
    is_durable = True

    def __init__(
        self,
        files: Sequence[DataFile],
        budget_bytes: int,
        bad: Iterable[Extent],
        *,
        tracer: Tracer,
        on_damage: OnDamage,
        on_freed: Sequence[Callable[[NvmeRegion], None]],
    ) -> None:
        """Take over the data files, which `close` closes.

        Args:
            bad: extents that were found damaged, and are never used again.
            on_damage: called with the error of a damaged block and the block's extents. It adds to the error the names
                of the parameters in the block, and records the extents, so that a restarted daemon does not use them
                either.
            on_freed: each is called with each region whose last holder releases it, before its extents are free, so
                that tiers with copies of the region forget them.

        Raises:
            BudgetExceededError: committed versions alone exceed the budget.
        """
        self.files = tuple(files)
        self.budget_bytes = budget_bytes
        self.counters = TierCounters()
        self._tracer = tracer
        self._on_damage = on_damage
        self._on_freed = on_freed
        self.bad = set(bad)
        self.damaged_blocks = 0
        self._damaged: dict[NvmeRegion, DamagedBlockError] = {}
        self._file_of = {file.number: file for file in self.files}
        self._unsynced: set[NvmeRegion] = set()
        self._new: set[NvmeRegion] = set()
        if self.used_bytes > budget_bytes:
            raise BudgetExceededError(
                f"nvme_budget {shown_size(budget_bytes)} is less than the {shown_size(self.used_bytes)} of committed "
                f"versions in {self._paths}; raise nvme_budget to at least {least_size(self.used_bytes)} or delete "
                "jobs"
            )

    @property
    def used_bytes(self) -> int:
        """The bytes of all data files that are in allocated extents."""
        return sum(file.used_bytes for file in self.files)

    @property
    def bad_bytes(self) -> int:
        """The bytes of all data files that were found damaged and are never used again."""
        return sum(extent.nbytes for extent in self.bad)

    @property
    def new_regions(self) -> Collection[NvmeRegion]:
        """Regions that a `new_version` block is filling and that belong to no slab yet."""
        return self._new

    @property
    def queue_depth(self) -> int:
        """The number of read and write requests of all data files that wait or run."""
        return sum(file.io.load.queued for file in self.files)

    @property
    def bandwidth(self) -> float:
        """The sum of the measured speeds of the devices, in bytes per second; 0 if none was measured."""
        return sum(file.bandwidth or 0.0 for file in self.files)

    @property
    def devices(self) -> Sequence[DataFile]:
        """The data files, each on its device."""
        return self.files

    @property
    def problems(self) -> list[str]:
        """Texts for operators that say why the tier is degraded, except by stuck devices; empty if it is not."""
        damaged = [f"{error.version} is damaged" for error in self._damaged.values()]
        problems = damaged[:MOST_NAMED] + ([f"{len(damaged)} versions are damaged"] if damaged[MOST_NAMED:] else [])
        if doubtful := sum(region.doubtful for region in self._unsynced):
            problems.append(f"{doubtful} versions were not confirmed by the device, and will be written again")
        return problems

    @property
    def detail(self) -> str:
        """A text for operators that describes the data files, and whether their I/O bypasses the page cache."""
        return "; ".join(
            f"{file.path} ({'O_DIRECT' if file.direct else 'buffered: no O_DIRECT on this file system'})"
            for file in self.files
        )

    # --- space

    def reserve(self, nbytes: int) -> None:
        """Make sure that `nbytes` more can be allocated, so that a step does not fail in its middle for lack of space.

        Raises:
            BudgetExceededError: the budget cannot hold them.
            DiskFullError: the file systems cannot hold them.
        """
        need = round_up(nbytes)
        if self.used_bytes + need > self.budget_bytes:
            raise BudgetExceededError(
                f"nvme_budget {shown_size(self.budget_bytes)} is too small: {shown_size(self.used_bytes)} are in use "
                f"and {shown_size(need)} more are needed in {self._paths}; raise nvme_budget to at least "
                f"{least_size(self.used_bytes + need)}, or delete jobs (`paramserver-admin delete-job`)"
            )
        self._grow(need - sum(file.usable_bytes for file in self.files))

    async def allocate(self, nbytes: int, label: str = "scratch", block_bytes: int = BLOCK_BYTES) -> NvmeRegion:
        """Return a region of `nbytes` for the version `label`. The files grow if their free space is too small."""
        extents = self._place(nbytes)
        if extents is None:
            self.reserve(nbytes)
            extents = self._place(nbytes)
        if extents is None:
            # The files have enough free bytes, but in pieces that are too small for the region, so the files grow.
            self._grow(round_up(nbytes))
            extents = self._place(nbytes)
            assert extents is not None
        self.counters.moved_bytes += round_up(nbytes)
        return NvmeRegion(self, extents, Checksums(label, round_up(nbytes), block_bytes))

    def stored(self, region: NvmeRegion) -> tuple[tuple[Extent, ...], bytes]:
        """Return the region's extents and checksums, for the catalog; callable on any thread."""
        return region.extents, region.checksums.dump()

    def restored(
        self, extents: tuple[Extent, ...], checksums: bytes, label: str, nbytes: int, block_bytes: int
    ) -> NvmeRegion:
        """Return the region of a version that is in the catalog, from the values that `stored` returned.

        Raises:
            DataLossError: the checksums do not fit `nbytes`, which are whole pages.
        """
        return NvmeRegion(self, extents, Checksums(label, nbytes, block_bytes, checksums))

    def is_damaged(self, region: NvmeRegion) -> bool:
        """Return whether the region has pages that were found damaged and are never used again."""
        return bool(self.bad) and any(
            extent.file == bad.file and extent.offset < bad.end and bad.offset < extent.end
            for extent in region.extents
            for bad in self.bad
        )

    def damaged_bytes(self, regions: Iterable[NvmeRegion]) -> int:
        """Return the number of damaged bytes that are never used again and lie outside of `regions`."""
        if not self.bad:
            return 0
        extents = [extent for region in regions for extent in region.extents]
        return sum(part.nbytes for extent in self.bad for part in without(extent, extents))

    @contextlib.asynccontextmanager
    async def new_version(self, nbytes: int, label: str, block_bytes: int = BLOCK_BYTES) -> AsyncIterator[NvmeRegion]:
        """Allocate a region, which the body of the `with` block fills and gives to a slab.

        If the body fails or is cancelled, the region is freed:

            async with nvme.new_version(slab.nbytes, slab.label(step)) as region:
                await nvme.write_from(region, 0, view)
                slab.add_version(step, region)

        Args:
            nbytes: the size of the region, which the tier rounds up to whole pages.
            label: the name of the version, see `Slab.label`.
            block_bytes: the bytes that one checksum covers, see `SlabLayout`.

        Raises:
            BudgetExceededError, DiskFullError: there is no room for the version.
        """
        region = await self.allocate(nbytes, label, block_bytes)
        self._new.add(region)
        try:
            yield region
        except BaseException:
            self.free(region)
            raise
        finally:
            self._new.discard(region)

    def hold(self, *regions: NvmeRegion) -> None:
        """Keep the extents of all regions until `free` was called once more for each region.

        Raises:
            NotFoundError: all holders of a region have freed it. Its extents may hold other bytes by now, and to free
                them a second time would give them to two regions. No region is held then.
        """
        for region in regions:
            if not region.holders:
                raise NotFoundError(f"{region.checksums.label} is not stored any more")
        for region in regions:
            region.holders += 1

    def free(self, region: NvmeRegion) -> None:
        """Release a region. Its extents are freed when the last holder has released it."""
        region.holders -= 1
        if region.holders:
            return
        for forget in self._on_freed:
            forget(region)
        self.counters.moved_bytes += region.nbytes
        self._unsynced.discard(region)
        self._damaged.pop(region, None)
        for extent in region.extents:
            for part in without(extent, self.bad) if self.bad else (extent,):
                self._file_of[extent.file].free(part)

    def _place(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Return extents for `nbytes` from the free space, in stripes over the files; None if there is too little."""
        if len(self.files) == 1:
            return self.files[0].allocate(nbytes)
        extents: list[Extent] = []
        is_placed = False
        try:
            stripes = (min(REQUEST_BYTES, nbytes - start) for start in range(0, nbytes, REQUEST_BYTES))
            is_placed = all(self._place_piece(stripe, extents) for stripe in stripes)
        finally:
            if not is_placed:
                for extent in extents:
                    self._file_of[extent.file].free(extent)
        return tuple(extents) if is_placed else None

    def _place_piece(self, nbytes: int, extents: list[Extent]) -> bool:
        """Add extents for `nbytes` to `extents`, and return whether there was room for them.

        They are in the file with the fewest bytes in proportion to its speed, among the files that have room or can
        grow. If only several files together have room, they are in several files.
        """
        for file in sorted(self.files, key=lambda file: file.used_bytes / self._speed(file)):
            placed = file.allocate(nbytes)
            if placed is None:
                with contextlib.suppress(BudgetExceededError):
                    self._grow_file(file, round_up(nbytes))
                    placed = file.allocate(nbytes)
            if placed is not None:
                extents += placed
                return True
        if sum(file.usable_bytes for file in self.files) < nbytes:
            return False
        # The bytes that no single file has room for are halved, and each half is placed. This ends, because at least
        # one file has a whole unit of SPLIT_BYTES free.
        half = round_up(nbytes // 2, SPLIT_BYTES)
        return self._place_piece(half, extents) and self._place_piece(nbytes - half, extents)

    def _speed(self, file: DataFile) -> float:
        """Return the speed of a file's device for comparison with the others; 1.0 for each unless all were measured."""
        return file.bandwidth or 1.0 if all(other.bandwidth for other in self.files) else 1.0

    def _grow(self, missing: int) -> None:
        """Make the files longer by `missing` bytes, in proportion to the speeds of their devices.

        A file on a full device leaves its share to the other files.
        """
        candidates = list(self.files)
        while missing > 0:
            speed = sum(self._speed(file) for file in candidates)
            for file in list(candidates):
                share = missing if file is candidates[-1] else round_up(int(missing * self._speed(file) / speed))
                try:
                    missing -= self._grow_file(file, min(share, missing))
                except DiskFullError:
                    candidates.remove(file)
                    if not candidates:
                        raise

    def _grow_file(self, file: DataFile, missing: int) -> int:
        """Make a file longer by `missing` bytes, or by more if there is room, and return by how many."""
        if missing <= 0:
            return 0
        room = self.budget_bytes - sum(other.occupied_bytes for other in self.files)
        if missing > room:
            raise BudgetExceededError(
                f"nvme_budget {shown_size(self.budget_bytes)}: {self._paths} occupy all but "
                f"{shown_size(max(room, 0))} of it, and {shown_size(missing)} more are needed; raise nvme_budget to "
                f"at least {least_size(self.budget_bytes + missing - room)}, or delete jobs "
                "(`paramserver-admin delete-job`)"
            )
        # Grow by no more than this file's share of the rest of the budget, so that the other files can grow, too.
        fair = room // len(self.files) // PAGE_BYTES * PAGE_BYTES
        wanted = max(missing, min(round_up(missing, GROWTH_BYTES), fair))
        try:
            file.grow(wanted)
        except DiskFullError:
            if wanted == missing:
                raise
            wanted = missing
            file.grow(wanted)
        return wanted

    # --- bytes

    async def read_into(
        self, region: NvmeRegion, offset: int, buffer: memoryview, priority: Priority = Priority.DEMAND
    ) -> None:
        """Fill `buffer` with whole checksum blocks of the region, verified; see `read_many`."""
        await self.read_many([Move(region, offset, buffer)], priority)

    async def write_from(
        self, region: NvmeRegion, offset: int, buffer: memoryview, priority: Priority = Priority.UPDATE
    ) -> None:
        """Write `buffer`, which is whole checksum blocks of the region; see `write_many`."""
        await self.write_many([Move(region, offset, buffer)], priority)

    async def read_many(self, moves: Sequence[Move[NvmeRegion]], priority: Priority) -> None:
        """Fill the buffers with verified bytes. Bytes that are neighbours on a device are read together.

        Raises:
            DamagedBlockError: a block does not have the bytes that were written, also when it is read again.
            DeviceError: the bytes cannot be read.
        """
        await self._read(moves, priority, verified=True)

    async def read_raw(self, moves: Sequence[Move[NvmeRegion]], priority: Priority) -> None:
        """Fill the buffers like `read_many`, but without verifying them.

        The caller verifies them by the regions' checksums before it uses any byte. For a part with wrong bytes it calls
        `read_many`, which reads the part again and sets its pages aside if they are damaged.
        """
        await self._read(moves, priority, verified=False)

    async def _read(self, moves: Sequence[Move[NvmeRegion]], priority: Priority, *, verified: bool) -> None:
        """Fill the buffers, and hold the regions until that is done."""
        self.hold(*(move.region for move in moves))
        try:
            activity = Activity.SCRUB if priority is Priority.SCRUB else Activity.NVME_READ
            with self.counters.reading, self._span(activity, moves):
                await self._move(moves, priority, write=False, checked=verified)
            for move in moves:
                if verified and not move.region.blocks_are_whole:
                    await self._verify(move, priority)
            self.counters.bytes_read += sum(len(move.buffer) for move in moves)
        except DamagedBlockError as error:
            # The damaged pages are set aside, so that no version gets them again, while the read still holds the
            # region. If the other holders have released the region meanwhile, the end of the read frees it, and the
            # damaged pages would then be used again.
            self._set_aside(error, next(t.region for t in moves if t.region.checksums.label == error.label))
            raise
        finally:
            for move in moves:
                self.free(move.region)

    async def _verify(self, move: Move[NvmeRegion], priority: Priority) -> None:
        """Verify a region whose blocks may lie in several extents."""
        verify = functools.partial(move.region.checksums.verify, move.offset, move.buffer)
        try:
            await asyncio.to_thread(verify)
        except DamagedBlockError:
            # The bytes do not match their checksums, but may have gone wrong on their way and not on the disk, so they
            # are read once more.
            await self._move([move], priority, write=False, checked=False)
            await asyncio.to_thread(verify)

    async def write_many(self, moves: Sequence[Move[NvmeRegion]], priority: Priority) -> None:
        """Write the buffers and keep their checksums. The bytes are durable only after `sync`.

        Bytes that are neighbours on a device are written together.
        """
        await self._write(moves, priority, recorded=False)

    async def write_raw(self, moves: Sequence[Move[NvmeRegion]], priority: Priority) -> None:
        """Write the buffers like `write_many`, but the caller has recorded their checksums in the regions."""
        await self._write(moves, priority, recorded=True)

    async def _write(self, moves: Sequence[Move[NvmeRegion]], priority: Priority, *, recorded: bool) -> None:
        self.hold(*(move.region for move in moves))
        for move in moves:
            move.region.writers += 1
            move.region.writes += 1
            self._unsynced.add(move.region)
        try:
            for region, offset, buffer in moves:
                if not recorded and not region.blocks_are_whole:
                    await asyncio.to_thread(region.checksums.record, offset, buffer)
            with self.counters.writing, self._span(Activity.NVME_WRITE, moves):
                await self._move(moves, priority, write=True, checked=not recorded)
            self.counters.bytes_written += sum(len(move.buffer) for move in moves)
        finally:
            for move in moves:
                move.region.writers -= 1
                self.free(move.region)

    async def sync(self) -> None:
        """Wait until the devices have all bytes that were written before this call.

        Raises:
            DeviceError: a device may have lost bytes that were written since the last sync. Their regions become
                doubtful; see `NvmeRegion`.
        """
        # The sync does not cover bytes that are written while it runs, even if their region was written before, too. So
        # only regions without writes during the sync count as synced.
        covered = {region: region.writes for region in self._unsynced if not region.writers}
        try:
            await finish_all([asyncio.ensure_future(file.io.sync()) for file in self.files])
        except BaseException:
            for region in self._unsynced:
                region.doubtful = True
            raise
        self._unsynced -= {r for r, writes in covered.items() if r.writes == writes and not r.doubtful}
        for file in self.files:
            file.sample()

    async def close(self) -> None:
        """Finish all requests and close the data files."""
        for file in self.files:
            await file.close()

    async def _move(self, moves: Sequence[Move[NvmeRegion]], priority: Priority, *, write: bool, checked: bool) -> None:
        """Cut the moves into requests, and wait until each device has done its requests."""
        requests: dict[int, list[IoRequest]] = {file.number: [] for file in self.files}
        for move in moves:
            region = move.region
            checksums = region.checksums.record if write else region.checksums.verify
            for extent, offset, piece in _pieces(move):
                check = functools.partial(checksums, offset, piece) if checked and region.blocks_are_whole else None
                requests[extent.file].append(IoRequest(extent.offset, piece, check))
        calls = [
            (file.io.write if write else file.io.read)(requests[file.number], priority)
            for file in self.files
            if requests[file.number]
        ]
        if len(calls) == 1:
            await calls[0]
        else:
            await finish_all([asyncio.ensure_future(call) for call in calls])

    def _span(self, activity: Activity, moves: Sequence[Move[NvmeRegion]]) -> AbstractContextManager[None]:
        # Reads or writes that are made together belong to one group, so the traced span gets the label of the first
        # one.
        label = moves[0].region.checksums.label if moves else ""
        return self._tracer.span(activity, label, sum(len(move.buffer) for move in moves))

    def _set_aside(self, error: DamagedBlockError, region: NvmeRegion) -> None:
        """Count and report a damaged block, and never use its pages again."""
        extents = list(overlapping(region.extents, error.offset, error.nbytes))
        new = [extent for extent in extents if extent not in self.bad]
        self.damaged_blocks += 1
        self.bad.update(new)
        self._on_damage(error, new)
        if region not in self._damaged:
            log.error("%s", error)
        self._damaged[region] = error

    @property
    def _paths(self) -> str:
        return ", ".join(str(file.path) for file in self.files)


def _pieces(move: Move[NvmeRegion]) -> Iterator[tuple[Extent, int, memoryview]]:
    """Cut a move into requests; yield for each its extent, its offset in the region and its part of the buffer."""
    region, offset, buffer = move
    if offset + len(buffer) > region.nbytes:
        raise ValueError(f"a move of {len(buffer)} bytes at {offset} leaves its region of {region.nbytes} bytes")
    done, most = 0, REQUEST_BYTES // region.block_bytes * region.block_bytes
    for extent in overlapping(region.extents, offset, len(buffer)):
        for start in range(0, extent.nbytes, most):
            length = min(most, extent.nbytes - start)
            place = Extent(extent.offset + start, length, extent.file)
            yield place, offset + done, buffer[done : done + length]
            done += length
