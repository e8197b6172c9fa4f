"""A state directory with many jobs, whose catalog is written by the engine's own code and whose bytes are zeros.

Only what the catalog holds is made: jobs, groups, shards, one commit of each job, and the place and the checksums of
each slab. The data file is sparse, so a million shards take 1 GB of file size and no disk. Its bytes read as zeros, and
the checksums are those of zeros, so the daemon's background verification finds no damage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.common.measure import Progress
from storage.catalog.catalog import Catalog
from storage.catalog.records import CommitRecord, StoredVersion
from storage.config import EngineConfig
from storage.directories import CATALOG
from storage.engine import Engine
from storage.integrity import Checksums
from storage.shard import (
    ELEMENT_ALIGNMENT,
    DType,
    Durability,
    GroupSpec,
    JobSpec,
    Kind,
    ParameterSpec,
    Shard,
    SlabKey,
    SlabSpec,
    TierName,
)
from storage.tiers.extents import Extent

LARGE_JOB = "large"
STEP = 100
SLABS = (
    SlabSpec(kind=Kind.PARAM, dtype=DType.BFLOAT16, placement=TierName.NVME),
    *(
        SlabSpec(kind=kind, dtype=DType.FLOAT32, placement=TierName.NVME)
        for kind in (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
    ),
)
# All slabs are smaller than a page, so each has one page and one checksum.
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ZEROS = memoryview(bytes(_PAGE_BYTES))
_JOBS_OF_A_TRANSACTION = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of jobs, and of the tensors of each. A shard is one kind of one tensor, and there are four kinds.

    Attributes:
        jobs: the number of all jobs, of which one is large.
        tensors: the tensors of each job but the large one.
        large_tensors: the tensors of the large job.
        tensors_of_a_group: the tensors that are stored together.
    """

    jobs: int
    tensors: int
    large_tensors: int
    tensors_of_a_group: int = 4

    @property
    def shards(self) -> int:
        """The shards of all jobs together."""
        return ((self.jobs - 1) * self.tensors + self.large_tensors) * len(SLABS)


async def fill(state_dir: Path, size: Size, progress: Progress) -> None:
    """Make a state directory with such a catalog.

    Raises:
        StorageError: the file system refuses.
    """
    # The engine makes the directory as a daemon does: the data file, the empty catalog and their labels.
    engine = await Engine.open(EngineConfig(state_dir=state_dir, host_budget_bytes=32 << 20, nvme_budget_bytes=1 << 30))
    data = engine.nvme.files[0]
    number, path = data.number, data.path
    await engine.close()
    catalog = Catalog(state_dir / CATALOG)
    pages = count()
    try:
        for first in range(0, size.jobs, _JOBS_OF_A_TRANSACTION):
            progress(f"writing job {first} of {size.jobs}")
            with catalog.transaction():
                for job in range(first, min(first + _JOBS_OF_A_TRANSACTION, size.jobs)):
                    name, tensors = (f"run-{job:05d}", size.tensors) if job else (LARGE_JOB, size.large_tensors)
                    _add_job(catalog, name, _groups(tensors, size.tensors_of_a_group), number, pages)
    finally:
        catalog.close()
    os.truncate(path, next(pages) * _PAGE_BYTES)


def _groups(tensors: int, of_a_group: int) -> list[GroupSpec]:
    names = [f"model.layers.{i // 8}.block.{i % 8}.weight" for i in range(tensors)]
    return [_group(number, names[i : i + of_a_group]) for number, i in enumerate(range(0, tensors, of_a_group))]


def _group(number: int, names: Sequence[str]) -> GroupSpec:
    numel = ELEMENT_ALIGNMENT * len(names)
    shards = tuple(
        Shard(fqn=fqn, offset=0, numel=ELEMENT_ALIGNMENT, group_offset=i * ELEMENT_ALIGNMENT)
        for i, fqn in enumerate(names)
    )
    return GroupSpec(name=f"unit.{number}:0-{numel}", numel=numel, shards=shards, slabs=SLABS)


def _add_job(catalog: Catalog, name: str, groups: Sequence[GroupSpec], file: int, pages: Iterator[int]) -> None:
    spec = JobSpec(
        name=name,
        world_size=1,
        local_ranks=0,
        parameters=tuple(
            ParameterSpec(fqn=shard.fqn, shape=(shard.numel,), dtype=DType.BFLOAT16, trainable=True)
            for group in groups
            for shard in group.shards
        ),
        durability=Durability(every_steps=1),
    )
    now = time.time()
    catalog.create_job(spec, groups, now)
    keys = [SlabKey(name, group.name, slab.kind) for group in groups for slab in group.slabs]
    written = {
        key: (STEP, _version_of_zeros(key, Extent(next(pages) * _PAGE_BYTES, _PAGE_BYTES, file))) for key in keys
    }
    catalog.add_commit(name, CommitRecord(step=STEP, committed_at=now, client_states={0: b"{}"}), written)


def _version_of_zeros(key: SlabKey, extent: Extent) -> StoredVersion:
    checksums = Checksums(key.label(STEP), extent.nbytes)
    checksums.record(0, _ZEROS)
    return StoredVersion((extent,), checksums.dump())
