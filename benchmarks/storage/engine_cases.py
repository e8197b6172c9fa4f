"""The benchmarks of the engine: the cost of a commit with many slabs, and the speed of updates compared with fio."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.measure import Case, CpuStopwatch, Progress, Sample, Threads, compete
from benchmarks.storage import fio
from benchmarks.storage.fio import FioJob
from benchmarks.storage.jobs import JOB, BenchmarkLayout, Training, adamw, nothing, training
from storage.base.integrity import Checksums
from storage.base.shard import SlabKey
from storage.catalog.catalog import Catalog
from storage.catalog.records import CommitRecord, StoredVersion
from storage.tiers.base import PAGE_BYTES
from storage.tiers.extents import Extent
from storage.tiers.nvme import REQUEST_BYTES

TINY_ELEMENTS = 1024
COMMIT_HOST_BUDGET = 256 << 20
# The largest size of fio's files for the update stream. fio goes over them again until it has moved as many bytes as
# the engine.
FIO_FILE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """The numbers of slabs per commit, the model whose updates are streamed, and the host budget for that."""

    slabs: tuple[int, ...]
    streamed: BenchmarkLayout
    host_budget_bytes: int


async def commit_latency(
    slabs: int, threads: Threads, directory: Path, steps: int, progress: Progress
) -> dict[str, Any]:
    """Return the seconds of the updates, of the commit, and of the same transaction on a catalog alone.

    Each step updates `slabs` slabs of 1024 elements, in groups of four, with a kernel that does nothing. A warm-up step
    comes before the `steps` measured ones.
    """
    layout = BenchmarkLayout(groups=slabs // 4, numel=TINY_ELEMENTS)
    updates, commits = [], []
    try:
        async with training(layout, directory / "commit", threads, host_budget_bytes=COMMIT_HOST_BUDGET) as run:
            for number in range(steps + 1):
                progress(f"commit of {layout.slabs} slabs: " + (f"step {number} of {steps}" if number else "warm-up"))
                gradients = await run.gradients()
                with CpuStopwatch() as watch:
                    await run.update(gradients, nothing)
                updates.append(watch.seconds)
                with CpuStopwatch() as watch:
                    await run.commit()
                commits.append(watch.seconds)
            progress(f"commit of {layout.slabs} slabs: the catalog alone")
        (directory / "catalog").mkdir()
        alone = _catalog_alone(layout, steps, directory / "catalog" / "catalog.sqlite")
    finally:
        shutil.rmtree(directory / "commit", ignore_errors=True)
        shutil.rmtree(directory / "catalog", ignore_errors=True)
    return {
        "slabs": layout.slabs,
        "update_seconds": _seconds(updates[1:]),
        "commit_seconds": _seconds(commits[1:]),
        "catalog_seconds": _seconds(alone[1:]),
    }


def _catalog_alone(layout: BenchmarkLayout, steps: int, path: Path) -> list[float]:
    """Return the seconds of each transaction that records a new version of every slab and deletes the old ones."""
    specs = layout.group_specs()
    keys = [SlabKey(JOB, spec.name, slab.kind) for spec in specs for slab in spec.slabs if slab.kind.value != "grad"]
    with closing(Catalog(path)) as catalog:
        with catalog.transaction():
            catalog.create_job(layout.job_spec(), specs, time.time())
        seconds = []
        for step in range(steps + 1):
            written = _versions(keys, step)
            with CpuStopwatch() as watch, catalog.transaction():
                record = CommitRecord(step=step, committed_at=time.time(), client_states={0: b""})
                catalog.add_commit(JOB, record, written)
                catalog.retain(JOB, [step])
            seconds.append(watch.seconds)
    return seconds


def _versions(keys: Sequence[SlabKey], step: int) -> Mapping[SlabKey, tuple[int, StoredVersion]]:
    """Return a new version of each slab: one page, at another place than in the step before."""
    checksums = Checksums("benchmark", PAGE_BYTES).dump()
    first = step % 2 * len(keys)
    return {
        key: (step, StoredVersion((Extent((first + i) * PAGE_BYTES, PAGE_BYTES),), checksums))
        for i, key in enumerate(keys)
    }


async def update_streaming(
    sizes: EngineSizes, threads: Threads, directory: Path, rounds: int, progress: Progress
) -> dict[str, Any]:
    """Compare AdamW over states on NVMe with fio, which reads and writes as many bytes at the same time.

    Return the report (see measure.py), with the model's `parameters` and the `commit_seconds` of the steps.
    """
    layout, commits = sizes.streamed, []
    try:
        progress("update_streaming: initial values")
        state_dir = directory / "stream"
        async with training(layout, state_dir, threads, host_budget_bytes=sizes.host_budget_bytes) as run:

            async def ours(_: int) -> Sample:
                sample, seconds = await _streamed(run)
                commits.append(seconds)
                return sample

            yardstick = fio.find(state_dir, direct=run.engine.nvme.files[0].direct)
            jobs = (
                _stream_job("read", layout.read_bytes, threads.read, state_dir),
                _stream_job("write", layout.written_bytes, threads.write, state_dir),
            )
            case = Case(
                name="update_streaming",
                fio=(lambda: yardstick.run(*jobs)) if yardstick else None,
                ours=ours,
            )
            report = (await compete([case], rounds, progress))[case.name]
    finally:
        shutil.rmtree(directory / "stream", ignore_errors=True)
    return report | {"parameters": layout.groups * layout.numel, "commit_seconds": _seconds(commits[1:])}


async def _streamed(run: Training) -> tuple[Sample, float]:
    """Make one step whose states are on NVMe only; return the sample of its updates and the seconds of its commit."""
    for slab in run.job.slabs():
        run.engine.host_cache.free_copy(slab)
    counters = run.engine.nvme.counters
    gradients = await run.gradients()
    before = counters.bytes_read + counters.bytes_written
    with CpuStopwatch() as watch:
        await run.update(gradients, adamw)
    sample = watch.sample(counters.bytes_read + counters.bytes_written - before)
    with CpuStopwatch() as watch:
        await run.commit()
    return sample, watch.seconds


def _stream_job(mode: fio.FioMode, nbytes: int, threads: int, directory: Path) -> FioJob:
    return FioJob(
        mode=mode,
        file=directory / f"fio-{mode}",
        nbytes=nbytes,
        threads=threads,
        block_sizes=(REQUEST_BYTES,),
        file_bytes=min(nbytes, FIO_FILE_BYTES),
    )


def _seconds(samples: Sequence[float]) -> dict[str, Any]:
    return {"samples": [round(s, 6) for s in samples], "median": round(statistics.median(samples), 6)}
