"""The catalog's database: its tables, its format version, and the damage that SQLite itself can find."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from storage.base.errors import ConflictError, DataLossError, DeviceError, DiskFullError, FormerFormatError

FORMAT_VERSION = 6
REMEDY = "restore the whole state directory from a backup, or use another one"

# SQLite truncates its log to this many bytes after a large commit.
_LOG_BYTES = 64 << 20
# SQLite's error codes which do not mean that the file is damaged if they occur while the catalog is opened.
_NO_DAMAGE = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
)

_TABLES_OF_5 = (
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
)
# The columns that format 6 added, by table, each with the text behind it in the statement that makes the table.
_ADDED = {"jobs": ("settled INTEGER", ") STRICT"), "slabs": ("codec TEXT", ", UNIQUE (grp, kind)) STRICT")}


def _with_added(statement: str) -> str:
    """Return the statement of format 6 for a table of format 5.

    It is the text that SQLite keeps after `add_columns`, so `find_version` accepts new and migrated catalogs alike.
    """
    for table, (column, behind) in _ADDED.items():
        if f"TABLE {table} " in statement:
            return statement.replace(behind, f", {column}{behind}")
    return statement


# The statements that make the tables, by format version.
_TABLES = {5: _TABLES_OF_5, FORMAT_VERSION: tuple(map(_with_added, _TABLES_OF_5))}


# SQLite opens files whose paths, with "-journal" appended, have at most 512 bytes. A symbolic link to a long path does
# not help, because SQLite resolves it first.
_MAX_PATH_BYTES = 512 - len("-journal")


def connect(path: Path) -> sqlite3.Connection:
    """Open or create the database file. The caller uses the connection within `errors`, which translates exceptions.

    Raises:
        DataLossError: the file's header has a write version that SQLite does not know.
    """
    if path.exists():
        with path.open("rb") as file:
            header = file.read(100)
        # SQLite would open a file with an unknown write version read-only, and the first commit would fail.
        if header.startswith(b"SQLite format 3\0") and header[18] > 2:
            raise DataLossError(f"{path} is damaged (its header has an unknown write version); {REMEDY}")
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        # In WAL mode only FULL syncs at each commit, and a committed step must survive a power loss.
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        # Some builds of SQLite overwrite deleted rows with zeros by default. That doubles the bytes of a commit.
        db.execute("PRAGMA secure_delete = OFF")
    except BaseException:
        db.close()
        raise
    return db


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables of the present format. Call this inside a transaction."""
    for statement in _TABLES[FORMAT_VERSION]:
        db.execute(statement)


def add_columns(db: sqlite3.Connection) -> None:
    """Add to the tables of format 5 the columns that format 6 added. Call this inside a transaction."""
    for table, (column, _) in _ADDED.items():
        db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")


def find_version(db: sqlite3.Connection, path: Path) -> int | None:
    """Return the format version of a catalog, after SQLite's own checks; None for an empty database.

    Raises:
        ConflictError: the database is not a catalog, or has a format that this version does not know.
        FormerFormatError: the database has a format before 5.
        DataLossError: SQLite finds damage, or the tables are not those of the format.
    """
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if not tables:
        return None
    if "meta" not in tables:
        raise ConflictError(f"{path} is a database but not a catalog; use another state directory")
    row = db.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
    versions = {str(version): version for version in _TABLES}
    if row is not None and row[0] in ("1", "2", "3", "4"):
        raise FormerFormatError(f"{path} has format version {row[0]}, and this software knows {', '.join(versions)}")
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
    """Raise DataLossError if a row refers to a job, group, slab or step that does not exist."""
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
    """Translate SQLite's errors within the block to the engine's exception types.

    While `opening`, an error of an unknown cause, or a row that cannot be parsed, is translated to DataLossError.
    """
    try:
        yield
    except sqlite3.Error as error:
        # The low byte of SQLite's extended error codes is the primary code, and only primary codes are compared here.
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
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        if not opening:
            raise
        raise DataLossError(f"{path} is damaged ({error!r}); {REMEDY}") from error
