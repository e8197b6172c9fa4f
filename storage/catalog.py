"""The catalog: what is committed, in one SQLite database. A commit is one transaction, synced before it returns.

Only committed facts are in here: a job enters with its first durable commit, and extents that no row names are free.
All methods block; the engine calls them from one thread of their own.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage.errors import ConflictError, DataLossError, DeviceError, DiskFullError
from storage.failpoints import Failpoint, reach
from storage.shard import (
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

FORMAT_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, world_size INTEGER NOT NULL,
    every_steps INTEGER NOT NULL, parameters TEXT NOT NULL, created_at REAL NOT NULL) STRICT;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
    name TEXT NOT NULL, numel INTEGER NOT NULL, shards TEXT NOT NULL, UNIQUE (job, name)) STRICT;
CREATE TABLE slabs (
    id INTEGER PRIMARY KEY, grp INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
    kind TEXT NOT NULL, dtype TEXT NOT NULL, placement TEXT NOT NULL, UNIQUE (grp, kind)) STRICT;
CREATE TABLE commits (
    job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE, step INTEGER NOT NULL, committed_at REAL NOT NULL,
    PRIMARY KEY (job, step)) STRICT;
CREATE TABLE client_states (
    job INTEGER NOT NULL, step INTEGER NOT NULL, rank INTEGER NOT NULL, state BLOB NOT NULL,
    PRIMARY KEY (job, step, rank),
    FOREIGN KEY (job, step) REFERENCES commits ON DELETE CASCADE) STRICT;
CREATE TABLE versions (
    slab INTEGER NOT NULL REFERENCES slabs ON DELETE CASCADE, step INTEGER NOT NULL, extents TEXT NOT NULL,
    checksums BLOB NOT NULL, PRIMARY KEY (slab, step)) STRICT;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One committed step of a job; `client_states` by rank."""

    step: int
    committed_at: float
    client_states: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """Where the bytes of one version of a slab are, and their checksums (see integrity.py)."""

    extents: tuple[Extent, ...]
    checksums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """All that the catalog knows of a job. `versions`: where each slab's bytes are, by step."""

    spec: JobSpec
    created_at: float
    groups: tuple[GroupSpec, ...]
    commits: tuple[CommitRecord, ...]
    versions: Mapping[SlabKey, Mapping[int, StoredVersion]]


class Catalog:
    """The open database."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the database.

        Raises:
            ConflictError: it has a format that this version does not know.
            DataLossError: it is not a database any more.
        """
        self._path = path
        with self._errors():
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                # WAL with NORMAL does not sync at commit; a committed step must survive power loss.
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
                self._check_format()
            except BaseException:
                self._db.close()
                raise

    def load(self) -> list[StoredJob]:
        """Every job with its groups, commits and versions."""
        with self._errors():
            return [
                self._load_job(*row)
                for row in self._db.execute(
                    "SELECT id, name, world_size, every_steps, parameters, created_at FROM jobs"
                )
            ]

    def create_job(self, spec: JobSpec, groups: Sequence[GroupSpec], created_at: float) -> None:
        """Records a job and its layout; part of its first durable commit, to be called inside `transaction`."""
        parameters = [[p.fqn, list(p.shape), p.dtype.value, p.trainable] for p in spec.parameters]
        job = self._db.execute(
            "INSERT INTO jobs (name, world_size, every_steps, parameters, created_at) VALUES (?, ?, ?, ?, ?)",
            (spec.name, spec.world_size, spec.durability.every_steps, json.dumps(parameters), created_at),
        ).lastrowid
        for group in groups:
            shards = [[s.fqn, s.offset, s.numel, s.position] for s in group.shards]
            row = self._db.execute(
                "INSERT INTO groups (job, name, numel, shards) VALUES (?, ?, ?, ?)",
                (job, group.name, group.numel, json.dumps(shards)),
            ).lastrowid
            self._db.executemany(
                "INSERT INTO slabs (grp, kind, dtype, placement) VALUES (?, ?, ?, ?)",
                [(row, slab.kind.value, slab.dtype.value, slab.placement.value) for slab in group.slabs],
            )

    def add_commit(self, job: str, commit: CommitRecord, written: Mapping[SlabKey, tuple[int, StoredVersion]]) -> None:
        """Records a step, and for each slab in `written` the step and place of its bytes; inside `transaction`."""
        job_id = self._job_id(job)
        self._db.execute("INSERT INTO commits VALUES (?, ?, ?)", (job_id, commit.step, commit.committed_at))
        self._db.executemany(
            "INSERT INTO client_states VALUES (?, ?, ?, ?)",
            [(job_id, commit.step, rank, state) for rank, state in commit.client_states.items()],
        )
        slabs = self._slab_ids(job_id)
        self._db.executemany(
            "INSERT INTO versions VALUES (?, ?, ?, ?)",
            [
                (
                    slabs[key.group, key.kind.value],
                    step,
                    json.dumps([[e.offset, e.nbytes] for e in version.extents]),
                    version.checksums,
                )
                for key, (step, version) in written.items()
            ],
        )

    def retain(self, job: str, steps: Sequence[int]) -> None:
        """Forgets all commits but `steps`, and the versions that none of them sees; inside `transaction`."""
        if not steps:
            self._db.execute("DELETE FROM jobs WHERE name = ?", (job,))
            return
        job_id = self._job_id(job)
        marks = ",".join("?" * len(steps))
        self._db.execute(f"DELETE FROM commits WHERE job = ? AND step NOT IN ({marks})", (job_id, *steps))
        # A retained step sees, of each slab, the newest version that is not newer than the step.
        seen = " UNION ".join(
            "SELECT v.slab, MAX(v.step) FROM versions v JOIN slabs s ON s.id = v.slab JOIN groups g ON g.id = s.grp "
            "WHERE g.job = ? AND v.step <= ? GROUP BY v.slab"
            for _ in steps
        )
        self._db.execute(
            "DELETE FROM versions "
            "WHERE slab IN (SELECT s.id FROM slabs s JOIN groups g ON g.id = s.grp WHERE g.job = ?) "
            f"AND (slab, step) NOT IN ({seen})",
            (job_id, *(value for step in steps for value in (job_id, step))),
        )

    def set_placements(self, placements: Mapping[SlabKey, TierName]) -> None:
        """Records where slabs are at home now, in a transaction of its own."""
        with self.transaction():
            self._db.executemany(
                "UPDATE slabs SET placement = ? WHERE kind = ? AND grp = "
                "(SELECT g.id FROM groups g JOIN jobs j ON j.id = g.job WHERE j.name = ? AND g.name = ?)",
                [(tier.value, key.kind.value, key.job, key.group) for key, tier in placements.items()],
            )

    def delete_job(self, job: str) -> None:
        """Forgets a job, in a transaction of its own."""
        with self.transaction():
            self._db.execute("DELETE FROM jobs WHERE name = ?", (job,))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside happen together, and are on the device when it ends; or none."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                reach(Failpoint.BEFORE_FLIP)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        reach(Failpoint.AFTER_FLIP)

    def close(self) -> None:
        """Closes the database."""
        self._db.close()

    def _check_format(self) -> None:
        if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            self._db.executescript(
                f"BEGIN; {_SCHEMA} INSERT INTO meta VALUES ('format_version', '{FORMAT_VERSION}');"
                f"INSERT INTO meta VALUES ('created_at', '{time.time()}'); COMMIT;"
            )
        (found,) = self._db.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
        if found != str(FORMAT_VERSION):
            raise ConflictError(
                f"{self._path} has format version {found}, this software knows version {FORMAT_VERSION}; "
                "use the software that wrote it, or another state directory"
            )

    def _load_job(
        self, job_id: int, name: str, world_size: int, every_steps: int, parameters: str, created_at: float
    ) -> StoredJob:
        spec = JobSpec(
            name=name,
            world_size=world_size,
            local_ranks=0,
            durability=Durability(every_steps=every_steps),
            parameters=tuple(
                ParameterSpec(fqn=fqn, shape=tuple(shape), dtype=DType(dtype), trainable=trainable)
                for fqn, shape, dtype, trainable in json.loads(parameters)
            ),
        )
        states: dict[int, dict[int, bytes]] = {}
        for step, rank, state in self._db.execute(
            "SELECT step, rank, state FROM client_states WHERE job = ?", (job_id,)
        ):
            states.setdefault(step, {})[rank] = state
        commits = tuple(
            CommitRecord(step=step, committed_at=at, client_states=states.get(step, {}))
            for step, at in self._db.execute(
                "SELECT step, committed_at FROM commits WHERE job = ? ORDER BY step", (job_id,)
            )
        )
        return StoredJob(
            spec=spec,
            created_at=created_at,
            groups=self._load_groups(job_id),
            commits=commits,
            versions=self._load_versions(job_id, name),
        )

    def _load_groups(self, job_id: int) -> tuple[GroupSpec, ...]:
        slabs: dict[int, list[SlabSpec]] = {}
        for group, kind, dtype, placement in self._db.execute(
            "SELECT grp, kind, dtype, placement FROM slabs "
            "WHERE grp IN (SELECT id FROM groups WHERE job = ?) ORDER BY id",
            (job_id,),
        ):
            slabs.setdefault(group, []).append(
                SlabSpec(kind=Kind(kind), dtype=DType(dtype), placement=TierName(placement))
            )
        return tuple(
            GroupSpec(
                name=name,
                numel=numel,
                shards=tuple(
                    Shard(fqn=fqn, offset=offset, numel=n, position=position)
                    for fqn, offset, n, position in json.loads(shards)
                ),
                slabs=tuple(slabs[group]),
            )
            for group, name, numel, shards in self._db.execute(
                "SELECT id, name, numel, shards FROM groups WHERE job = ? ORDER BY id", (job_id,)
            )
        )

    def _load_versions(self, job_id: int, job: str) -> dict[SlabKey, dict[int, StoredVersion]]:
        versions: dict[SlabKey, dict[int, StoredVersion]] = {}
        for group, kind, step, extents, checksums in self._db.execute(
            "SELECT g.name, s.kind, v.step, v.extents, v.checksums FROM versions v "
            "JOIN slabs s ON s.id = v.slab JOIN groups g ON g.id = s.grp WHERE g.job = ?",
            (job_id,),
        ):
            versions.setdefault(SlabKey(job, group, Kind(kind)), {})[step] = StoredVersion(
                tuple(Extent(offset, nbytes) for offset, nbytes in json.loads(extents)), checksums
            )
        return versions

    def _job_id(self, job: str) -> int:
        row = self._db.execute("SELECT id FROM jobs WHERE name = ?", (job,)).fetchone()
        if row is None:
            raise DataLossError(f"{self._path} has no job {job!r}")
        return int(row[0])

    def _slab_ids(self, job_id: int) -> dict[tuple[str, str], int]:
        rows = self._db.execute(
            "SELECT g.name, s.kind, s.id FROM slabs s JOIN groups g ON g.id = s.grp WHERE g.job = ?", (job_id,)
        )
        return {(group, kind): slab for group, kind, slab in rows}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Gives SQLite's errors the engine's types."""
        try:
            yield
        except sqlite3.Error as error:
            # Extended codes carry the primary one in their low byte.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise DiskFullError(
                    f"the file system of {self._path} is full; free space there. Committed steps are intact"
                ) from error
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise DataLossError(f"{self._path} is damaged ({error}); restore it from a backup") from error
            raise DeviceError(f"{self._path}: {error}") from error
