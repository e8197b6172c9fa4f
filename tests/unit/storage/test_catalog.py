"""The catalog gives back what was committed, forgets what nobody can want, and refuses what it does not know."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage.catalog import Catalog
from storage.catalog_format import FORMAT_VERSION
from storage.errors import ConflictError, DataLossError, DeviceError, DiskFullError
from storage.records import CommitRecord, StoredVersion
from storage.shard import DType, Kind, SlabKey, TierName
from storage.tiers.extents import Extent
from tests.unit.storage.builders import Layout

LAYOUT = Layout(precision=DType.BFLOAT16, weights=TierName.NVME, moments=TierName.HOST, every_steps=3)
GROUPS = tuple(LAYOUT.group(name) for name in LAYOUT.groups)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.sqlite"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    """A catalog with one job."""
    with closing(Catalog(path)) as opened:
        with opened.transaction():
            opened.create_job(LAYOUT.job(), GROUPS, 12.5)
        yield opened


def key(group: int = 0, kind: Kind = Kind.MASTER) -> SlabKey:
    return SlabKey("job", LAYOUT.groups[group], kind)


def commit(catalog: Catalog, step: int, written: dict[SlabKey, tuple[int, StoredVersion]]) -> CommitRecord:
    record = CommitRecord(step=step, committed_at=100.0 + step, client_states={0: b"\x00state", 3: b""})
    with catalog.transaction():
        catalog.add_commit("job", record, written)
    return record


def extent(number: int) -> StoredVersion:
    extents = (Extent(number * 4096, 4096), Extent((1 << 40) + number * 4096, 4096))
    return StoredVersion(extents, checksums=number.to_bytes(8, "little"))


def test_everything_that_was_committed_comes_back_after_reopening(catalog: Catalog, path: Path) -> None:
    first = commit(catalog, 0, {key(): (0, extent(1)), key(1, Kind.PARAM): (0, extent(2))})
    second = commit(catalog, 3, {key(): (2, extent(3))})
    with closing(Catalog(path)) as again:
        (job,) = again.load()
    assert job.spec == LAYOUT.job().without_ranks()
    assert (job.created_at, job.groups, job.commits) == (12.5, GROUPS, (first, second))
    assert job.versions == {key(): {0: extent(1), 2: extent(3)}, key(1, Kind.PARAM): {0: extent(2)}}


def test_names_are_data_whatever_they_hold(path: Path) -> None:
    layout = Layout(name="'; DROP TABLE jobs; --/../\N{SNOWMAN}", groups=("%s{}\\", "a'b\"c"))
    with closing(Catalog(path)) as catalog:
        with catalog.transaction():
            catalog.create_job(layout.job(), [layout.group(name) for name in layout.groups], 1.0)
        (job,) = catalog.load()
    assert job.spec.name == layout.name and {group.name for group in job.groups} == set(layout.groups)


@pytest.mark.parametrize(
    ("kept", "master", "param"),
    [
        # `master` was written in steps 0, 2, 3; `param` in 0 only: every retained step still sees that one.
        ([0, 2, 3], {0, 2, 3}, {0}),
        ([2, 3], {2, 3}, {0}),
        ([3], {3}, {0}),
        ([1, 3], {0, 3}, {0}),
        ([0], {0}, {0}),
    ],
)
def test_a_retained_step_keeps_exactly_the_versions_that_it_sees(
    catalog: Catalog, kept: list[int], master: set[int], param: set[int]
) -> None:
    commit(catalog, 0, {key(): (0, extent(0)), key(kind=Kind.PARAM): (0, extent(9))})
    commit(catalog, 1, {})
    for step in (2, 3):
        commit(catalog, step, {key(): (step, extent(step))})
    with catalog.transaction():
        catalog.retain("job", kept)
    (job,) = catalog.load()
    assert [c.step for c in job.commits] == kept
    assert {name: set(steps) for name, steps in job.versions.items()} == {key(): master, key(kind=Kind.PARAM): param}


def test_retaining_touches_no_other_job(catalog: Catalog) -> None:
    other = Layout(name="other")
    with catalog.transaction():
        catalog.create_job(other.job(), [other.group(name) for name in other.groups], 1.0)
        record = CommitRecord(step=0, committed_at=1.0, client_states={})
        catalog.add_commit("other", record, {SlabKey("other", "block.0", Kind.PARAM): (0, extent(5))})
    commit(catalog, 0, {key(): (0, extent(0))})
    with catalog.transaction():
        catalog.retain("job", [])
    (left,) = catalog.load()
    assert left.spec.name == "other" and len(left.versions) == 1
    catalog.delete_job("other")
    assert catalog.load() == []


def test_a_transaction_that_fails_leaves_nothing(catalog: Catalog) -> None:
    with pytest.raises(RuntimeError, match="in the middle"), catalog.transaction():
        catalog.add_commit("job", CommitRecord(step=0, committed_at=1.0, client_states={0: b"x"}), {})
        raise RuntimeError("in the middle")
    (job,) = catalog.load()
    assert job.commits == ()
    commit(catalog, 0, {})


def test_a_step_cannot_be_committed_twice(catalog: Catalog) -> None:
    commit(catalog, 0, {})
    with pytest.raises(DeviceError, match="UNIQUE"):
        commit(catalog, 0, {})


def test_placements_can_change(catalog: Catalog) -> None:
    catalog.set_placements({key(0, Kind.EXP_AVG): TierName.NVME})
    (job,) = catalog.load()
    placements = [group.slab_of_kind[Kind.EXP_AVG].placement for group in job.groups]
    assert placements == [TierName.NVME, TierName.HOST]


def test_another_format_version_is_refused_and_left_alone(catalog: Catalog, path: Path) -> None:
    catalog.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = '999' WHERE key = 'format_version'")
    with pytest.raises(ConflictError, match=f"{path} has format version 999.*knows version {FORMAT_VERSION}"):
        Catalog(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM jobs").fetchall() == [("job",)]


def test_a_database_of_somebody_else_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(ConflictError, match=f"{path} is a database but not a catalog; use another state directory"):
        Catalog(path)


def test_a_file_that_is_no_database_is_data_loss(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(DataLossError, match=f"{path} is damaged.*restore the whole state directory"):
        Catalog(path)


def test_damaged_pages_are_data_loss(catalog: Catalog, path: Path) -> None:
    for step in range(40):
        commit(catalog, step, {key(): (step, extent(step))})
    catalog.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(DataLossError, match="is damaged"), closing(Catalog(path)) as damaged:
        damaged.load()


def test_a_full_disk_is_told_by_the_name_of_the_file_and_what_was_committed_stays(catalog: Catalog, path: Path) -> None:
    commit(catalog, 0, {})
    # SQLite reports a database at its largest size as it reports a full file system.
    (pages,) = catalog._db.execute("PRAGMA page_count").fetchone()
    catalog._db.execute(f"PRAGMA max_page_count = {pages}")
    big = CommitRecord(step=1, committed_at=1.0, client_states={0: bytes(1 << 20)})
    with (
        pytest.raises(DiskFullError, match=f"file system of {path} is full; free space there. Committed steps are int"),
        catalog.transaction(),
    ):
        catalog.add_commit("job", big, {})
    (job,) = catalog.load()
    assert [c.step for c in job.commits] == [0]
    catalog._db.execute("PRAGMA max_page_count = 1000000")
    with catalog.transaction():
        catalog.add_commit("job", big, {})
    assert catalog.load()[0].commits[1] == big


def test_a_commit_is_synced_before_it_returns(catalog: Catalog) -> None:
    # In WAL mode only FULL (2) syncs the log at each commit.
    assert catalog._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert catalog._db.execute("PRAGMA synchronous").fetchone() == (2,)
