"""The benchmarks of the NVMe tier and fio: large and small requests, slabs, reads beside writes, many small tensors.

Each side has its own file, which the warm-up writes once; later rounds overwrite it. Every round writes other bytes.
The bytes that the tier reads are compared with those written, independently of the tier's own checksums.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import BenchmarkError, Case, CpuStopwatch, Progress, Sample, Threads, compete
from benchmarks.storage import fio
from benchmarks.storage.fio import Fio, FioJob, FioMode
from storage.base.tracing import Tracer
from storage.memory.host_cache import EvictionOrder
from storage.tiers.base import PAGE_BYTES, round_up
from storage.tiers.contract import Move
from storage.tiers.data_file import DataFile
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority
from storage.tiers.nvme import REQUEST_BYTES, NvmeRegion, NvmeTier

MIB = 1 << 20
# The tier itself splits such a region into requests of REQUEST_BYTES.
LARGE_REGION_BYTES = 16 << 20
TENSOR_PAGES = range(1, 17)
WORDS_PER_PAGE = PAGE_BYTES // 8
SEED = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """The sizes of the cases. `model_width` and `model_blocks` are those of the GPT-2 whose slabs are moved whole."""

    sequential_bytes: int
    model_width: int
    model_blocks: int
    tensors: int

    @property
    def slabs(self) -> list[int]:
        """The bytes of each slab: for every block (attention, MLP, two layer norms) one in bf16 and one in fp32."""
        numel = 12 * self.model_width**2 + 13 * self.model_width
        return [round_up(numel * itemsize) for _ in range(self.model_blocks) for itemsize in (2, 4)]

    @property
    def largest_bytes(self) -> int:
        """The number of bytes that the largest case moves."""
        return max(self.sequential_bytes, sum(self.slabs), self.tensors * TENSOR_PAGES[-1] * PAGE_BYTES)


async def run(sizes: TierSizes, threads: Threads, directory: Path, rounds: int, progress: Progress) -> dict[str, Any]:
    """Run all cases, group by group, in files below `directory`; return a report by case (see measure.py)."""
    host = HostTier(sizes.largest_bytes + 2 * PAGE_BYTES, EvictionOrder(), lambda: None)
    try:
        host.arena.finish_collapse()
        memory = host.view(await host.allocate(sizes.largest_bytes))
        contests: tuple[Callable[[Bench], Awaitable[list[Case]]], ...] = (
            lambda bench: bench.sequential("1mib", sizes.sequential_bytes, MIB, MIB),
            lambda bench: bench.sequential("4mib", sizes.sequential_bytes, REQUEST_BYTES, LARGE_REGION_BYTES),
            lambda bench: bench.shards(sizes.slabs),
            lambda bench: bench.mixed(sizes.sequential_bytes),
            lambda bench: bench.tensors(sizes.tensors),
        )
        results: dict[str, Any] = {}
        for cases_of in contests:
            async with _opened(directory / "tier", memory, threads) as bench:
                results |= await compete(await cases_of(bench), rounds, progress)
        return results
    finally:
        await host.close()


@asynccontextmanager
async def _opened(directory: Path, memory: memoryview, threads: Threads) -> AsyncIterator[Bench]:
    """Yield a tier in a new directory, which is removed at the end of the block."""
    directory.mkdir()
    try:
        file = DataFile(0, directory / "data.0", (), read_threads=threads.read, write_threads=threads.write)
        nvme = NvmeTier(
            [file], 2 * len(memory), (), tracer=Tracer(), on_damage=lambda _error, _extents: None, on_freed=()
        )
        try:
            yield Bench(nvme, memory, fio.find(directory, direct=file.direct), threads)
        finally:
            await nvme.close()
    finally:
        shutil.rmtree(directory)


class Payload:
    """Host memory with random bytes; each page begins with a mark, a word that is different in every round."""

    def __init__(self, view: memoryview) -> None:
        self.nbytes = len(view)
        words = np.frombuffer(view, dtype=np.uint64)
        words[:] = np.random.default_rng(SEED).integers(1 << 63, size=len(words), dtype=np.uint64)
        self._marks = words[::WORDS_PER_PAGE]
        self._pages = np.arange(len(self._marks), dtype=np.uint64)
        self._written = self._marks.copy()

    def renew(self, number: int) -> None:
        """Give every page a new mark for this round."""
        self._written = self._pages + np.uint64((number + 1) << 32)
        self._marks[:] = self._written

    def clear(self) -> None:
        """Set the marks of all pages to zero in memory, so that only a read from the tier can restore them."""
        self._marks[:] = 0

    def check(self) -> None:
        """Raise BenchmarkError unless a read restored the mark of every page."""
        if not np.array_equal(self._marks, self._written):
            raise BenchmarkError("the tier has not read what it wrote")


class Bench:
    """A tier with its memory, an fio beside it, and the cases in which both are compared."""

    def __init__(self, nvme: NvmeTier, memory: memoryview, fio: Fio | None, threads: Threads) -> None:
        self.nvme = nvme
        self._memory = memory
        self._fio = fio
        self._threads = threads

    async def sequential(self, name: str, nbytes: int, request: int, region: int) -> list[Case]:
        """Return the cases that write and read `nbytes` in order.

        The tier gets regions of `region` bytes, which it splits into requests; fio makes requests of `request` bytes.
        """
        payload, items = await self._items([region] * (nbytes // region))
        jobs = [self._fio_job(mode, name, payload, (request,)) for mode in ("write", "read")]
        return [
            self._write(f"write_{name}", payload, items, jobs[0]),
            self._read(f"read_{name}", payload, items, jobs[1]),
        ]

    async def shards(self, slabs: Sequence[int]) -> list[Case]:
        """Return the cases that write and read whole slabs in random order; fio makes random requests of 4 MiB."""
        payload, items = await self._items(slabs)
        jobs = [self._fio_job(mode, "shards", payload, (REQUEST_BYTES,)) for mode in ("randwrite", "randread")]
        return [
            self._write("write_shards", payload, _shuffled(items), jobs[0]),
            self._read("read_shards", payload, _shuffled(_shuffled(items)), jobs[1]),
        ]

    async def tensors(self, count: int) -> list[Case]:
        """Return the cases of `count` small tensors in one batch: write, read in another order, read in order."""
        draw = random.Random(SEED)
        payload, items = await self._items([draw.choice(TENSOR_PAGES) * PAGE_BYTES for _ in range(count)])
        sizes = tuple(pages * PAGE_BYTES for pages in TENSOR_PAGES)
        jobs = [self._fio_job(mode, "tensors", payload, sizes) for mode in ("randwrite", "randread", "read")]
        return [
            self._write("write_tensors", payload, items, jobs[0]),
            self._read("read_tensors", payload, _shuffled(items), jobs[1]),
            self._read("read_tensors_in_order", payload, items, jobs[2]),
        ]

    async def mixed(self, nbytes: int) -> list[Case]:
        """Return the case that reads one half of `nbytes` while it writes the other half."""
        regions = [LARGE_REGION_BYTES] * (nbytes // 2 // LARGE_REGION_BYTES)
        kept, to_read = await self._items(regions)
        renewed, to_write = await self._items(regions, first=sum(regions))
        kept.renew(0)
        await self.nvme.write_many(to_read, Priority.UPDATE)
        jobs = [
            self._fio_job("read", "mixed-read", kept, (REQUEST_BYTES,)),
            self._fio_job("write", "mixed-write", renewed, (REQUEST_BYTES,)),
        ]

        async def ours(number: int) -> Sample:
            kept.clear()
            renewed.renew(number)
            sample = await self._timed(
                self.nvme.read_many(to_read, Priority.UPDATE), self.nvme.write_many(to_write, Priority.UPDATE)
            )
            kept.check()
            return sample

        return [Case(name="mixed", fio=self._run_fio(*jobs), ours=ours)]

    def _write(self, name: str, payload: Payload, items: Sequence[Move[NvmeRegion]], job: FioJob) -> Case:
        async def ours(number: int) -> Sample:
            payload.renew(number)
            return await self._timed(self.nvme.write_many(items, Priority.UPDATE))

        return Case(name=name, fio=self._run_fio(job), ours=ours)

    def _read(self, name: str, payload: Payload, items: Sequence[Move[NvmeRegion]], job: FioJob) -> Case:
        async def ours(_: int) -> Sample:
            payload.clear()
            sample = await self._timed(self.nvme.read_many(items, Priority.UPDATE))
            payload.check()
            return sample

        return Case(name=name, fio=self._run_fio(job), ours=ours)

    async def _timed(self, *work: Awaitable[None]) -> Sample:
        """Await `work`, and return its duration with the bytes that the tier counted meanwhile."""
        counters = self.nvme.counters
        before = counters.bytes_read + counters.bytes_written
        with CpuStopwatch() as watch:
            await asyncio.gather(*work)
        return watch.sample(counters.bytes_read + counters.bytes_written - before)

    async def _items(self, sizes: Sequence[int], first: int = 0) -> tuple[Payload, list[Move[NvmeRegion]]]:
        """Allocate a region of each size, and return moves to and from the memory that begins at byte `first`."""
        ends = list(itertools.accumulate(sizes, initial=first))
        items = [
            Move(await self.nvme.allocate(size), 0, self._memory[start : start + size])
            for start, size in zip(ends, sizes, strict=False)
        ]
        return Payload(self._memory[first : ends[-1]]), items

    def _fio_job(self, mode: FioMode, name: str, payload: Payload, block_sizes: tuple[int, ...]) -> FioJob:
        """Return a job that moves as many bytes as `payload` has, with as many threads as the tier."""
        return FioJob(
            mode=mode,
            file=self.nvme.files[0].path.with_name(f"fio-{name}"),
            nbytes=payload.nbytes,
            threads=self._threads.read if mode in ("read", "randread") else self._threads.write,
            block_sizes=block_sizes,
        )

    def _run_fio(self, *jobs: FioJob) -> Callable[[], Sample] | None:
        fio = self._fio
        return (lambda: fio.run(*jobs)) if fio else None


def _shuffled(items: Sequence[Move[NvmeRegion]]) -> list[Move[NvmeRegion]]:
    return random.Random(SEED + len(items)).sample(items, len(items))
