"""The catalog as a database: its tables, its format version, and what SQLite itself can say of damage."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from storage.errors import ConflictError, DataLossError, DeviceError, DiskFullError

FORMAT_VERSION = 4
REMEDY = "restore the whole state directory from a backup, or use another one"

# After a large commit the log is cut back to this.
_LOG_BYTES = 64 << 20
_NO_DAMAGE = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
)

_COMMON_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    """CREATE TABLE groups (
    id INTEGER PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
    name TEXT NOT NULL, numel INTEGER NOT NULL, shards TEXT NOT NULL, UNIQUE (job, name)) STRICT""",
    """CREATE TABLE slabs (
    id INTEGER PRIMARY KEY, grp INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
    kind TEXT NOT NULL, dtype TEXT NOT NULL, placement TEXT NOT NULL, UNIQUE (grp, kind)) STRICT""",
    """CREATE TABLE client_states (
    job INTEGER NOT NULL, step INTEGER NOT NULL, rank INTEGER NOT NULL, state BLOB NOT NULL,
    PRIMARY KEY (job, step, rank),
    FOREIGN KEY (job, step) REFERENCES commits ON DELETE CASCADE) STRICT""",
)
# By format version.
_TABLES = {
    1: (
        *_COMMON_TABLES,
        """CREATE TABLE jobs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, world_size INTEGER NOT NULL,
    every_steps INTEGER NOT NULL, parameters TEXT NOT NULL, created_at REAL NOT NULL) STRICT""",
        """CREATE TABLE commits (
    job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE, step INTEGER NOT NULL, committed_at REAL NOT NULL,
    PRIMARY KEY (job, step)) STRICT""",
        """CREATE TABLE versions (
    slab INTEGER NOT NULL REFERENCES slabs ON DELETE CASCADE, step INTEGER NOT NULL, extents TEXT NOT NULL,
    checksums BLOB NOT NULL, PRIMARY KEY (slab, step)) STRICT""",
    ),
    2: (
        *_COMMON_TABLES,
        """CREATE TABLE jobs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, world_size INTEGER NOT NULL,
    every_steps INTEGER NOT NULL, parameters TEXT NOT NULL, created_at REAL NOT NULL, digest BLOB NOT NULL) STRICT""",
        """CREATE TABLE commits (
    job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE, step INTEGER NOT NULL, committed_at REAL NOT NULL,
    digest BLOB NOT NULL, PRIMARY KEY (job, step)) STRICT""",
        """CREATE TABLE manifests (
    job INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE, step INTEGER NOT NULL, entries BLOB NOT NULL,
    checksum BLOB NOT NULL, PRIMARY KEY (job, step)) STRICT""",
        "CREATE TABLE files (id INTEGER PRIMARY KEY, directory TEXT NOT NULL) STRICT",
        """CREATE TABLE bad_extents (
    file INTEGER NOT NULL, offset INTEGER NOT NULL, nbytes INTEGER NOT NULL, reason TEXT NOT NULL,
    found_at REAL NOT NULL, PRIMARY KEY (file, offset)) STRICT""",
    ),
}
# What is new in 3 is in the names of jobs, in 4 in the number of a region's checksums.
_TABLES[3] = _TABLES[4] = _TABLES[2]


# SQLite opens files by names of at most 512 bytes, "-journal" at their end included. A link does not help, because
# SQLite resolves it first.
_MAX_PATH_BYTES = 512 - len("-journal")


def connect(path: Path) -> sqlite3.Connection:
    """Opens or creates the file; the caller wraps this, as all that follows, in `errors`.

    Raises:
        DataLossError: the file says that it must not be written.
    """
    if path.exists():
        with path.open("rb") as file:
            header = file.read(100)
        # SQLite would open it for reading only, and the first commit would be the first to notice.
        if header.startswith(b"SQLite format 3\0") and header[18] > 2:
            raise DataLossError(f"{path} is damaged (its header has an unknown write version); {REMEDY}")
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        # WAL with NORMAL does not sync at commit; a committed step must survive power loss.
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        # Some systems' SQLite overwrites what is deleted with zeros, as many bytes again as a commit writes.
        db.execute("PRAGMA secure_delete = OFF")
    except BaseException:
        db.close()
        raise
    return db


def create_tables(db: sqlite3.Connection) -> None:
    """Makes the tables of the present format, inside a transaction."""
    for statement in _TABLES[FORMAT_VERSION]:
        db.execute(statement)


def drop_tables(db: sqlite3.Connection) -> None:
    """Drops all tables, inside a transaction and without checks of foreign keys."""
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        db.execute(f'DROP TABLE "{name}"')


def find_version(db: sqlite3.Connection, path: Path) -> int | None:
    """The format of a catalog of which nothing is damaged that SQLite itself can know of; None: it is empty.

    Raises:
        ConflictError: it is not a catalog, or has a format that this version does not know.
        DataLossError: it is damaged.
    """
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if not tables:
        return None
    if "meta" not in tables:
        raise ConflictError(f"{path} is a database but not a catalog; use another state directory")
    row = db.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
    versions = {str(version): version for version in _TABLES}
    if row is None or row[0] not in versions:
        raise ConflictError(
            f"{path} has format version {row[0] if row else 'none'}, this software knows version {FORMAT_VERSION}; "
            "use the software that wrote it, or another state directory"
        )
    version = versions[row[0]]
    (problem,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if problem == "ok" and _schema(db) != _expected(version):
        problem = "its tables have changed"
    if problem != "ok":
        raise DataLossError(f"{path} is damaged ({problem}); {REMEDY}")
    return version


def check_references(db: sqlite3.Connection, path: Path) -> None:
    """Raises DataLossError if there are rows of jobs or steps that are not there."""
    if db.execute("PRAGMA foreign_key_check").fetchone():
        raise DataLossError(f"{path} is damaged (rows refer to others that are not there); {REMEDY}")


def _schema(db: sqlite3.Connection) -> set[tuple[str, ...]]:
    return set(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


def _expected(version: int) -> set[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        for statement in _TABLES[version]:
            db.execute(statement)
        return _schema(db)


@contextmanager
def errors(path: Path, *, opening: bool = False) -> Iterator[None]:
    """Gives SQLite's errors the engine's types. While `opening`, whatever cannot be understood is damage."""
    try:
        yield
    except sqlite3.Error as error:
        # Extended codes carry the primary one in their low byte.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                f"the file system of {path} is full; free space there. Committed steps are intact"
            ) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or (opening and code not in _NO_DAMAGE):
            raise DataLossError(f"{path} is damaged ({error}); {REMEDY}") from error
        length = len(os.fsencode(path.resolve()))
        if code == sqlite3.SQLITE_CANTOPEN and length > _MAX_PATH_BYTES:
            raise DeviceError(
                f"{path} has a path of {length} bytes, and SQLite opens files whose paths have at most "
                f"{_MAX_PATH_BYTES}; choose a state directory of at most "
                f"{_MAX_PATH_BYTES - len(os.fsencode(path.name)) - 1} bytes"
            ) from error
        raise DeviceError(f"{path}: {error}") from error
    except (LookupError, TypeError, ValueError) as error:
        if not opening:
            raise
        raise DataLossError(f"{path} is damaged ({error!r}); {REMEDY}") from error
