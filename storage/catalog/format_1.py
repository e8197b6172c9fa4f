"""Reader of catalogs in format 1, which had one row per version of a slab and no digests of the rows.

Only for their migration: nothing writes this format any more.
"""

from __future__ import annotations

import json
import sqlite3

from storage.catalog.records import CommitRecord, StoredJob, StoredVersion, parameters_from_text, shards_from_text
from storage.shard import DType, Durability, GroupSpec, JobSpec, Kind, SlabKey, SlabSpec, TierName
from storage.tiers.extents import Extent


def read_jobs(db: sqlite3.Connection) -> list[StoredJob]:
    """Return every job with its groups, commits and versions.

    Raises:
        LookupError, TypeError, ValueError: a row is damaged.
    """
    rows = db.execute("SELECT id, name, world_size, every_steps, parameters, created_at FROM jobs ORDER BY id")
    return [_read_job(db, *row) for row in rows]


def _read_job(
    db: sqlite3.Connection,
    job_id: int,
    name: str,
    world_size: int,
    every_steps: int,
    parameters: str,
    created_at: float,
) -> StoredJob:
    spec = JobSpec(
        name=name,
        world_size=world_size,
        local_ranks=0,
        durability=Durability(every_steps=every_steps),
        parameters=parameters_from_text(parameters),
    )
    states: dict[int, dict[int, bytes]] = {}
    for step, rank, state in db.execute("SELECT step, rank, state FROM client_states WHERE job = ?", (job_id,)):
        states.setdefault(step, {})[rank] = state
    commits = tuple(
        CommitRecord(step=step, committed_at=at, client_states=states.get(step, {}))
        for step, at in db.execute("SELECT step, committed_at FROM commits WHERE job = ? ORDER BY step", (job_id,))
    )
    return StoredJob(
        spec=spec,
        created_at=created_at,
        groups=_read_groups(db, job_id),
        commits=commits,
        versions=_read_versions(db, job_id, name),
    )


def _read_groups(db: sqlite3.Connection, job_id: int) -> tuple[GroupSpec, ...]:
    slabs: dict[int, list[SlabSpec]] = {}
    for group, kind, dtype, placement in db.execute(
        "SELECT grp, kind, dtype, placement FROM slabs WHERE grp IN (SELECT id FROM groups WHERE job = ?) ORDER BY id",
        (job_id,),
    ):
        slabs.setdefault(group, []).append(SlabSpec(kind=Kind(kind), dtype=DType(dtype), placement=TierName(placement)))
    return tuple(
        GroupSpec(name=name, numel=numel, shards=shards_from_text(shards), slabs=tuple(slabs[group]))
        for group, name, numel, shards in db.execute(
            "SELECT id, name, numel, shards FROM groups WHERE job = ? ORDER BY id", (job_id,)
        )
    )


def _read_versions(db: sqlite3.Connection, job_id: int, job: str) -> dict[SlabKey, dict[int, StoredVersion]]:
    versions: dict[SlabKey, dict[int, StoredVersion]] = {}
    for group, kind, step, extents, checksums in db.execute(
        "SELECT g.name, s.kind, v.step, v.extents, v.checksums FROM versions v "
        "JOIN slabs s ON s.id = v.slab JOIN groups g ON g.id = s.grp WHERE g.job = ?",
        (job_id,),
    ):
        versions.setdefault(SlabKey(job, group, Kind(kind)), {})[step] = StoredVersion(
            tuple(Extent(offset, nbytes) for offset, nbytes in json.loads(extents)), checksums
        )
    return versions
