"""The catalog: all committed jobs and steps, in one SQLite database.

A commit is one transaction, which is synced before the method returns. The catalog holds committed facts only: a job
enters it with its first durable commit, and extents that no commit needs are free.

Digests cover every row and are verified when the catalog is opened, so damage is reported and never read as data.
FORMAT.md describes the tables for other programs that read the database. All methods block; the engine calls them on a
thread of their own.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from storage.base.errors import DataLossError
from storage.base.failpoints import Failpoint, reach
from storage.base.open_files import OpenFiles
from storage.base.shard import GroupSpec, JobSpec, SlabKey, TierName
from storage.catalog.ledger import BadExtentList, CommitEntry, JobEntry, LayoutEntry, Ledger, ManifestEntry
from storage.catalog.manifest import Manifest, visible_entries
from storage.catalog.reader import checksum_of_manifest, digest_of_states, read_jobs, read_ledger
from storage.catalog.records import (
    BadExtent,
    CommitRecord,
    JobRecord,
    RolledBack,
    StoredVersion,
    parameters_to_text,
    rolled_back_from_text,
    rolled_back_to_text,
    shards_to_text,
)
from storage.catalog.tables import (
    FORMAT_VERSION,
    REMEDY,
    add_columns,
    check_references,
    connect,
    create_tables,
    errors,
    find_version,
)

log = logging.getLogger(__name__)

# The table `meta` has the roll-backs of each job. Their key is this prefix, followed by the name that the catalog has
# for the job.
_ROLLED_BACK = "rolled_back "


class Catalog:
    """The open database of one store. The engine records its commits here and loads them after a restart.

    The ledger has the database's contents in memory, without packed manifests and client states.
    """

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        """Open and verify the database, or create it; migrate a database of format 5.

        Args:
            path: the file of the database.
            files: the files that must still be at their paths whenever a transaction is committed. This method adds the
                database and its log to them. None: only the database and its log.

        Raises:
            ConflictError: the file is not a catalog, or has a format that this version does not know.
            DataLossError: the catalog is damaged. The message names the job and the step if they are known.
            DiskFullError, DeviceError: the file system refuses.
        """
        self.path = path
        # True after a transaction whose COMMIT failed, because a crash may still make that transaction valid. See
        # `resolve_doubt`.
        self.in_doubt = False
        self._files = OpenFiles() if files is None else files
        self._ledger = Ledger()
        # The jobs that were read when the catalog was opened. None after `load` has returned them, or after a
        # transaction, which may have changed them.
        self._read: list[JobRecord] | None = None
        with errors(path, opening=True):
            self._db = connect(path)
            try:
                version = find_version(self._db, path)
                if version is None:
                    self._create()
                elif version != FORMAT_VERSION:
                    self._migrate(version)
                self._db.execute("PRAGMA foreign_keys = ON")
                # All rows are read and verified once for both the ledger and the jobs, because one pass takes seconds
                # for a million shards.
                read: list[JobRecord] = []
                self._ledger = read_ledger(self._db, path, lambda job: read.append(job.stored()))
                self._read = read
                # A process that was killed may have left a transaction in SQLite's log which it had not synced. SQLite
                # reads the transaction as valid. The checkpoint syncs it, because a step that is shown as durable must
                # survive a power loss.
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._files.add(path)
                # SQLite's log is among the files that must stay at their paths, because it stays the same file for as
                # long as the database is open.
                self._files.add(Path(f"{path.resolve()}-wal"))
                # The references between tables are checked after the digests, because a wrong digest names the damaged
                # job or step, and a wrong reference does not.
                check_references(self._db, path)
            except BaseException:
                self._db.close()
                raise

    def load(self) -> list[JobRecord]:
        """Return every job with its groups, its commits and the versions that these commits need.

        Raises:
            DataLossError: a job or step is damaged; the message names it.
        """
        read, self._read = self._read, None
        with errors(self.path, opening=True):
            if read is None:
                read = [job.stored() for job in read_jobs(self._db, self.path)]
            marks = {key: text for key, text in self._ledger.meta if key.startswith(_ROLLED_BACK)}
            if not marks:
                return read
            keys = (_ROLLED_BACK + job.spec.stored_as for job in read)
            return [
                replace(job, rolled_back=rolled_back_from_text(marks[key])) if key in marks else job
                for job, key in zip(read, keys, strict=True)
            ]

    @property
    def store_id(self) -> str:
        """The random identity of this store, which the labels of its data directories repeat."""
        return dict(self._ledger.meta)["store_id"]

    def files(self) -> dict[int, str]:
        """Return the directory of each data file by the file's number; "." is the state directory."""
        return dict(self._ledger.files)

    def bad_extents(self) -> tuple[BadExtent, ...]:
        """Return the extents that must not be used any more, ordered by file and offset."""
        return self._ledger.bad_extents.extents

    def create_job(self, spec: JobSpec, groups: Sequence[GroupSpec], created_at: float) -> None:
        """Record a job and its layout, or a kept step of a job. Call this inside `transaction`.

        The engine records a job in the transaction of the job's first durable commit. It records a kept step as a job
        of its own with one commit, which later commits of the original job do not change.
        """
        parameters = parameters_to_text(spec.parameters)
        row = (spec.stored_as, spec.world_size, spec.durability.every_steps, parameters, float(created_at))
        job = self._next_id("jobs")
        numbered = list(enumerate(groups, self._next_id("groups")))
        slabs = [(number, slab) for number, group in numbered for slab in group.slabs]
        layout = LayoutEntry(
            tuple((number, group.name, group.numel, shards_to_text(group.shards)) for number, group in numbered),
            tuple(
                (number, group, slab.kind.value, slab.dtype.value, slab.placement.value, slab.codec or None)
                for number, (group, slab) in enumerate(slabs, self._next_id("slabs"))
            ),
        )
        # Earlier versions recorded the roll-backs of jobs that were not in the catalog, and left these records in the
        # catalog. They do not apply to the new job, so they are deleted.
        self._forget_rolled_back(spec.stored_as)
        self._db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, x'', NULL)", (job, *row))
        self._db.executemany(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?)", [(number, job, *rest) for number, *rest in layout.groups]
        )
        self._db.executemany("INSERT INTO slabs VALUES (?, ?, ?, ?, ?, ?)", layout.slabs)
        self._put(JobEntry(id=job, row=row, layout=layout))

    def add_commit(self, job: str, commit: CommitRecord, written: Mapping[SlabKey, tuple[int, StoredVersion]]) -> None:
        """Record a committed step. Call this inside `transaction`.

        Args:
            job: the catalog's name of the job or of the kept step (`JobSpec.stored_as`).
            commit: the step, with its time and its client states.
            written: for each slab whose bytes the catalog does not know yet, the step that wrote them and their place.
        """
        entry = self._job(job)
        self._db.execute("INSERT INTO commits VALUES (?, ?, ?, x'')", (entry.id, commit.step, commit.committed_at))
        self._db.executemany(
            "INSERT INTO client_states VALUES (?, ?, ?, ?)",
            [(entry.id, commit.step, rank, state) for rank, state in commit.client_states.items()],
        )
        recorded = CommitEntry(float(commit.committed_at), digest_of_states(commit.client_states))
        ids = entry.layout.slab_ids
        by_step: dict[int, tuple[list[int], list[StoredVersion]]] = {}
        for key, (step, version) in written.items():
            slabs, versions = by_step.setdefault(step, ([], []))
            slabs.append(ids[key.group, key.kind])
            versions.append(version)
        manifests = dict(entry.manifests)
        for step, new in by_step.items():
            manifest = Manifest.of(*new)
            if step in manifests:
                # A snapshot records slabs that were last written in an earlier step. An earlier snapshot may have
                # recorded other slabs of that step, so the catalog merges both lists into one manifest of the step.
                manifest = self._manifest(entry, step).replaced_by(manifest)
            manifests[step] = self._put_manifest(entry, step, manifest)
        self._put(replace(entry, commits={**entry.commits, commit.step: recorded}, manifests=manifests))

    def has_commit(self, job: str, step: int) -> bool:
        """Return whether the catalog has a commit of a step of a job."""
        return job in self._ledger.jobs and step in self._job(job).commits

    def replace_state(self, job: str, step: int, rank: int, state: bytes) -> None:
        """Replace the client state that a rank has stored with a committed step. Call this inside `transaction`."""
        entry = self._job(job)
        self._db.execute(
            "UPDATE client_states SET state = ? WHERE job = ? AND step = ? AND rank = ?", (state, entry.id, step, rank)
        )
        states = dict(
            self._db.execute("SELECT rank, state FROM client_states WHERE job = ? AND step = ?", (entry.id, step))
        )
        commit = replace(entry.commits[step], states=digest_of_states(states))
        self._put(replace(entry, commits={**entry.commits, step: commit}))

    def set_settled(self, job: str, step: int | None) -> None:
        """Record which commit of a job is the newest one that all nodes have. Call this inside `transaction`."""
        entry = self._job(job)
        if entry.settled != step:
            self._db.execute("UPDATE jobs SET settled = ? WHERE id = ?", (step, entry.id))
            self._put(replace(entry, settled=step))

    def record_settled(self, job: str, step: int | None) -> None:
        """Record the newest settled commit in a transaction of its own, unless it is recorded or the job is gone."""
        if job in self._ledger.jobs and self._job(job).settled != step:
            with self.transaction():
                self.set_settled(job, step)

    def retain(self, job: str, steps: Sequence[int]) -> None:
        """Delete all commits but `steps`, and the versions that none of them needs. Call this inside `transaction`."""
        if not steps:
            self._delete(job)
            return
        entry = self._job(job)
        dropped = entry.commits.keys() - set(steps)
        self._db.executemany("DELETE FROM commits WHERE job = ? AND step = ?", [(entry.id, step) for step in dropped])
        manifests = dict(entry.manifests)
        for step, mask in visible_entries({step: m.slabs for step, m in manifests.items()}, steps).items():
            if not mask.any():
                self._db.execute("DELETE FROM manifests WHERE job = ? AND step = ?", (entry.id, step))
                del manifests[step]
            elif 2 * mask.sum() < len(mask):
                # A step's manifest lists the versions that the step wrote. It stays as long as one of its slabs is not
                # written again, so it is rewritten without the versions that no step needs once they are more than half
                # of it.
                manifests[step] = self._put_manifest(entry, step, self._manifest(entry, step).only(mask))
        commits = {step: commit for step, commit in entry.commits.items() if step not in dropped}
        self._put(replace(entry, commits=commits, manifests=manifests))

    def add_rolled_back(self, job: str, mark: RolledBack) -> None:
        """Record an operator's roll-back of a job in the catalog. Call this inside `transaction`, after `retain`.

        An earlier roll-back to the same step or to a later step is forgotten, because the new roll-back gives up all
        steps that the earlier one gave up.
        """
        key, meta = _ROLLED_BACK + job, dict(self._ledger.meta)
        known = rolled_back_from_text(meta[key]) if key in meta else ()
        self._put_meta(key, rolled_back_to_text([*(one for one in known if one.step < mark.step), mark]))

    def set_placements(self, placements: Mapping[SlabKey, TierName]) -> None:
        """Record new placements (home tiers) of slabs, in a transaction of its own."""
        with self.transaction():
            for job in {key.job for key in placements}:
                entry = self._job(job)
                ids = entry.layout.slab_ids
                moved = {ids[key.group, key.kind]: tier.value for key, tier in placements.items() if key.job == job}
                self._db.executemany(
                    "UPDATE slabs SET placement = ? WHERE id = ?", [(tier, slab) for slab, tier in moved.items()]
                )
                slabs = tuple(
                    (slab, group, kind, dtype, moved.get(slab, tier), codec)
                    for slab, group, kind, dtype, tier, codec in entry.layout.slabs
                )
                self._put(replace(entry, layout=LayoutEntry(entry.layout.groups, slabs)))

    def delete_jobs(self, jobs: Iterable[str]) -> None:
        """Delete jobs and kept steps, given by the catalog's names, in a transaction of its own."""
        with self.transaction():
            for job in jobs:
                self._delete(job)

    def add_file(self, directory: str) -> int:
        """Record a data file, in a transaction of its own, and return the number of the file."""
        number = self._next_id("files")
        with self.transaction():
            self._put_file(number, directory)
        return number

    def add_bad_extents(self, found: Iterable[BadExtent]) -> None:
        """Record extents that must not be used any more, in a transaction of its own.

        A later record replaces an earlier one of the same file and offset.
        """
        # The time at which a damaged extent was found is made a float before the digest is computed, because SQLite
        # returns an integer time as a float, and the digests of the two differ.
        new = {(b.extent.file, b.extent.offset): replace(b, found_at=float(b.found_at)) for b in found}
        with self.transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO bad_extents VALUES (?, ?, ?, ?, ?)",
                [(*place, bad.extent.nbytes, bad.reason, bad.found_at) for place, bad in new.items()],
            )
            known = {(bad.extent.file, bad.extent.offset): bad for bad in self.bad_extents()}
            rows = BadExtentList(tuple(bad for _, bad in sorted({**known, **new}.items())))
            self._ledger = replace(self._ledger, bad_extents=rows)

    def resolve_doubt(self) -> None:
        """Make sure that a transaction whose COMMIT failed cannot become valid after a crash.

        The pages of the failed transaction may be complete in SQLite's log, and recovery after a crash would accept
        them. Until this is excluded, the extents of the failed transaction must not be used again, and its step must
        not be reported as rolled back. Any later transaction overwrites its place in the log, so this method makes one.
        See tests/faults/test_found_refused_commit.py.
        """
        if self.in_doubt:
            # A failed COMMIT left pages in the log of the open database, and this transaction overwrites them. So it
            # does not check that the files of the store are still at their paths: the open files count, even if they
            # were moved meanwhile.
            with self._transaction(lambda: None):
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                # The number `user_version` has no meaning in the catalog. It is changed because SQLite writes no page
                # for a transaction that changes nothing.
                self._db.execute(f"PRAGMA user_version = {(version + 1) % (1 << 31)}")

    def transaction(self) -> AbstractContextManager[None]:
        """Make all changes inside the block one transaction, which is on the device when the block ends.

        If the block or the commit raises, none of the changes is made.

        Raises:
            DeviceError: the database refuses, or a file of the store is not in its place any more.
        """
        return self._transaction(self._files.check)

    @contextmanager
    def _transaction(self, check: Callable[[], None]) -> Iterator[None]:
        """Make the changes inside the block one transaction. If `check`, called at its end, raises, undo them."""
        with errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            self._read = None
            before, committing = self._ledger, False
            try:
                yield
                self._seal(before)
                check()
                reach(Failpoint.BEFORE_FLIP)
                committing = True
                self._db.execute("COMMIT")
                self.in_doubt = False
            except BaseException as error:
                self._ledger = before
                # SQLite writes the page that makes a transaction valid last. If the disk was full, that page was not
                # written, so the transaction cannot become valid after a crash and is not in doubt.
                is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
                self.in_doubt |= committing and not is_full
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        reach(Failpoint.AFTER_FLIP)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _create(self) -> None:
        data = self.path.with_name("data.0")
        if data.exists() and data.stat().st_size:
            raise DataLossError(f"{self.path} is empty or was deleted, and {data} belongs to it; {REMEDY}")
        with self.transaction():
            create_tables(self._db)
            meta = (
                ("created_at", str(time.time())),
                ("format_version", str(FORMAT_VERSION)),
                ("store_id", secrets.token_hex(16)),
            )
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", [*meta, ("digest", "")])
            self._ledger = Ledger(meta=meta)
            self._put_file(0, ".")

    def _migrate(self, version: int) -> None:
        """Migrate a catalog of format 5 to the present one, in one transaction.

        The oldest commit of each job is recorded as settled, because a store deletes older commits only when it knows
        that all nodes have a newer one. If all ranks are on one node, the store has only the newest commit.
        """
        with self.transaction():
            add_columns(self._db)
            self._ledger = read_ledger(self._db, self.path)
            self._put_meta("format_version", str(FORMAT_VERSION))
            for name, entry in self._ledger.jobs.items():
                self.set_settled(name, min(entry.commits, default=None))
        log.info("%s was of format %d and is of format %d now", self.path, version, FORMAT_VERSION)

    def _put_meta(self, key: str, value: str) -> None:
        meta = {**dict(self._ledger.meta), key: value}
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
        # The rows of the table `meta` are sorted by key, because `read_ledger` computes their digest in this order.
        self._ledger = replace(self._ledger, meta=tuple(sorted(meta.items())))

    def _seal(self, before: Ledger) -> None:
        """Compute and write the digests of all rows that have changed since the ledger `before`."""
        for job in self._ledger.jobs.values():
            if before.jobs.get(job.name) is job:
                continue
            sealed = job.sealed()
            self._db.executemany(
                "UPDATE commits SET digest = ? WHERE job = ? AND step = ?",
                [(commit.digest, job.id, step) for step, commit in sealed.commits.items()],
            )
            self._db.execute("UPDATE jobs SET digest = ? WHERE id = ?", (sealed.digest, job.id))
            self._put(sealed)
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'digest'", (self._ledger.digest.hex(),))

    def _job(self, name: str) -> JobEntry:
        if name not in self._ledger.jobs:
            raise DataLossError(f"{self.path} has no job {name!r}")
        return self._ledger.jobs[name]

    def _put(self, job: JobEntry) -> None:
        self._ledger = self._ledger.with_job(job)

    def _delete(self, job: str) -> None:
        self._db.execute("DELETE FROM jobs WHERE name = ?", (job,))
        self._ledger = self._ledger.without_job(job)
        self._forget_rolled_back(job)

    def _forget_rolled_back(self, job: str) -> None:
        key, meta = _ROLLED_BACK + job, dict(self._ledger.meta)
        if meta.pop(key, None) is not None:
            self._db.execute("DELETE FROM meta WHERE key = ?", (key,))
            self._ledger = replace(self._ledger, meta=tuple(meta.items()))

    def _put_file(self, number: int, directory: str) -> None:
        self._db.execute("INSERT INTO files VALUES (?, ?)", (number, directory))
        self._ledger = replace(self._ledger, files={**self._ledger.files, number: directory})

    def _manifest(self, job: JobEntry, step: int) -> Manifest:
        """Read a packed manifest and verify it again.

        The caller writes a changed manifest with a new checksum. Without this check, damaged bytes would get a valid
        checksum then.
        """
        (packed,) = self._db.execute(
            "SELECT entries FROM manifests WHERE job = ? AND step = ?", (job.id, step)
        ).fetchone()
        if checksum_of_manifest(job.name, step, packed) != job.manifests[step].checksum:
            raise DataLossError(
                f"{self.path} was damaged while it was in use: it does not hold what step {step} of job {job.name!r} "
                f"wrote; {REMEDY}"
            )
        return Manifest.unpack(packed)

    def _put_manifest(self, job: JobEntry, step: int, manifest: Manifest) -> ManifestEntry:
        packed = manifest.pack()
        checksum = checksum_of_manifest(job.name, step, packed)
        self._db.execute("INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?)", (job.id, step, packed, checksum))
        return ManifestEntry(manifest.slabs, checksum)

    def _next_id(self, table: str) -> int:
        (newest,) = self._db.execute(f"SELECT max(id) FROM {table}").fetchone()
        return 1 if newest is None else newest + 1
