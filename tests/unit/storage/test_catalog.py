"""The catalog returns what was committed, deletes versions that no commit needs, and refuses damage and new formats."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from storage.base.errors import ConflictError, DataLossError, DeviceError, DiskFullError
from storage.base.shard import DType, Kind, SlabKey, TierName
from storage.catalog.catalog import Catalog
from storage.catalog.manifest import Manifest
from storage.catalog.records import BadExtent, CommitRecord, StoredVersion
from storage.catalog.tables import FORMAT_VERSION
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


def test_a_change_counts_although_the_jobs_were_read_at_the_opening(catalog: Catalog, path: Path) -> None:
    commit(catalog, 0, {key(): (0, extent(1))})
    with closing(Catalog(path)) as opened:
        commit(opened, 1, {key(): (1, extent(2))})
        (job,) = opened.load()
        assert [record.step for record in job.commits] == [0, 1]
        commit(opened, 2, {key(): (2, extent(3))})
        (job,) = opened.load()
        assert [record.step for record in job.commits] == [0, 1, 2]


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
        # `master` was written in steps 0, 2 and 3. `param` was written in step 0 only, and every retained step sees it.
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


def rows_of_manifests(path: Path) -> dict[int, int]:
    """Return the number of slabs in each manifest, by step."""
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT step, entries FROM manifests").fetchall()
    return {step: len(Manifest.unpack(entries).slabs) for step, entries in rows}


def test_entries_that_no_step_sees_go_when_they_are_the_larger_part_and_never_come_back(
    catalog: Catalog, path: Path
) -> None:
    everything = [key(group, kind) for group in range(2) for kind in LAYOUT.kinds]
    commit(catalog, 0, {name: (0, extent(i)) for i, name in enumerate(everything)})
    # Step 1 replaces 2 of the 8 slabs of step 0, and step 2 replaces 5 of them.
    for step, replaced, left in ((1, everything[:2], 8), (2, everything[:5], 3)):
        commit(catalog, step, {name: (step, extent(10 * step + i)) for i, name in enumerate(replaced)})
        with catalog.transaction():
            catalog.retain("job", [step])
        assert rows_of_manifests(path) == {0: left, step: len(replaced)}
        (job,) = catalog.load()
        assert job.versions == {
            name: {step: extent(10 * step + i)} if name in replaced else {0: extent(i)}
            for i, name in enumerate(everything)
        }


def test_a_snapshot_records_versions_of_several_steps(catalog: Catalog, path: Path) -> None:
    param, master, moment = key(kind=Kind.PARAM), key(), key(kind=Kind.EXP_AVG)
    commit(catalog, 0, {param: (0, extent(1))})
    commit(catalog, 3, {param: (3, extent(2)), master: (0, extent(3)), moment: (2, extent(4))})
    # A manifest has no slab twice. The later version replaces the earlier one.
    commit(catalog, 4, {master: (0, extent(5))})
    assert rows_of_manifests(path) == {0: 2, 2: 1, 3: 1}
    with closing(Catalog(path)) as again:
        (job,) = again.load()
    assert job.versions == {param: {0: extent(1), 3: extent(2)}, master: {0: extent(5)}, moment: {2: extent(4)}}


def test_whatever_is_committed_retained_and_rolled_back_each_step_sees_its_versions(path: Path) -> None:
    rng = random.Random(4)
    layout = Layout(groups=tuple(f"block.{i}" for i in range(5)), precision=DType.BFLOAT16)
    keys = [SlabKey("job", name, kind) for name in layout.groups for kind in layout.kinds]
    catalog = Catalog(path)
    with catalog.transaction():
        catalog.create_job(layout.job(), [layout.group(name) for name in layout.groups], 1.0)
    # The reference: by retained step, the version that its readers see of each slab.
    views: dict[int, dict[SlabKey, tuple[int, StoredVersion]]] = {}
    step = -1
    for turn in range(300):
        if rng.random() < 0.1 and len(views) > 1:
            del views[step]
            step = max(views)
            with catalog.transaction():
                catalog.retain("job", sorted(views))
        else:
            newest = views.get(step, {})
            step += 1
            written = {name: (step, extent(rng.randrange(1 << 30))) for name in keys if rng.random() < 0.3}
            views[step] = {**newest, **written}
            for old in rng.sample([*views], rng.choice([0, 0, 1, 2]) if len(views) > 3 else 0):
                views = {s: view for s, view in views.items() if s > old or s == step}
            with catalog.transaction():
                record = CommitRecord(step=step, committed_at=float(turn), client_states={0: rng.randbytes(8)})
                catalog.add_commit("job", record, written)
                catalog.retain("job", sorted(views))
        if turn % 10 == 0:
            catalog.close()
            catalog = Catalog(path)
        (job,) = catalog.load()
        assert [c.step for c in job.commits] == sorted(views)
        expected: dict[SlabKey, dict[int, StoredVersion]] = {}
        for view in views.values():
            for name, (version, place) in view.items():
                expected.setdefault(name, {})[version] = place
        assert job.versions == expected
    catalog.close()


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
    catalog.delete_jobs(["other"])
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


def test_data_files_and_bad_extents_are_remembered(catalog: Catalog, path: Path) -> None:
    assert catalog.files() == {0: "."} and catalog.bad_extents() == ()
    assert catalog.add_file("/mnt/second") == 1
    far, near = (
        BadExtent(extent=Extent(offset, 4096, 1), reason="a read failed", found_at=5.5) for offset in (1 << 40, 4096)
    )
    catalog.add_bad_extents([far])
    catalog.add_bad_extents([near, replace(far, reason="again")])
    with closing(Catalog(path)) as again:
        assert again.files() == catalog.files() == {0: ".", 1: "/mnt/second"}
        assert again.bad_extents() == catalog.bad_extents() == (near, replace(far, reason="again"))
        assert again.add_file("third") == 2


def test_whole_numbers_may_stand_for_times(catalog: Catalog, path: Path) -> None:
    with catalog.transaction():
        catalog.create_job(Layout(name="other").job(), [], 3)
        catalog.add_commit("other", CommitRecord(step=0, committed_at=4, client_states={}), {})
    catalog.add_bad_extents([BadExtent(extent=Extent(0, 4096), reason="", found_at=5)])
    with closing(Catalog(path)) as again:
        assert [job.created_at for job in again.load()] == [12.5, 3.0] and again.bad_extents()[0].found_at == 5.0


def test_ten_times_as_many_commits_take_no_more_room(catalog: Catalog, path: Path) -> None:
    sizes = []
    for step in range(300):
        with catalog.transaction():
            record = CommitRecord(step=step, committed_at=float(step), client_states={0: bytes(30_000)})
            catalog.add_commit(
                "job", record, {key(g, kind): (step, extent(1)) for g in (0, 1) for kind in LAYOUT.kinds}
            )
            catalog.retain("job", [max(0, step - 1), step])
        sizes.append(sum(file.stat().st_size for file in (path, path.with_name("catalog.sqlite-wal"))))
    # SQLite's log grows until SQLite checkpoints it into the database. Then SQLite overwrites it from the beginning.
    assert max(sizes[30:]) < 6 << 20 and max(sizes) == max(sizes[:150])


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


def test_a_catalog_that_is_missing_beside_its_data_is_data_loss(path: Path) -> None:
    path.with_name("data.0").write_bytes(bytes(4096))
    for _ in range(2):
        # In the second turn there is an empty file, which SQLite has made in the first one.
        with pytest.raises(DataLossError, match=f"{path} is empty or was deleted, and .*data.0 belongs to it"):
            Catalog(path)


WRITTEN_BY_3 = "what step 3 of job 'job' wrote"
STEP_3 = "job 'job', step 3,"


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE manifests SET entries = zeroblob(length(entries)) WHERE step = 3", WRITTEN_BY_3),
        ("UPDATE manifests SET checksum = zeroblob(16) WHERE step = 3", WRITTEN_BY_3),
        ("UPDATE manifests SET step = 2 WHERE step = 3", "what step 2 of job 'job' wrote"),
        ("DELETE FROM manifests WHERE step = 3", STEP_3),
        ("DELETE FROM manifests WHERE step = 0", "job 'job', step 0,"),
        ("INSERT INTO manifests SELECT * FROM spare", "the list of the steps of job 'job'"),
        ("UPDATE client_states SET state = x'00' WHERE step = 3 AND rank = 0", STEP_3),
        ("UPDATE client_states SET rank = 1 WHERE step = 3 AND rank = 0", STEP_3),
        ("DELETE FROM client_states WHERE step = 3", STEP_3),
        ("UPDATE commits SET committed_at = committed_at + 1 WHERE step = 3", STEP_3),
        ("UPDATE commits SET digest = zeroblob(16) WHERE step = 3", STEP_3),
        ("DELETE FROM commits WHERE step = 3", "the list of the steps of job 'job'"),
        ("UPDATE jobs SET world_size = 7", "job 'job', step 0,"),
        ("UPDATE jobs SET parameters = '[1'", "job 'job', step 0,"),
        ("UPDATE jobs SET name = 'jab'", "what step 0 of job 'jab' wrote"),
        ("UPDATE jobs SET digest = x''", "the list of the steps of job 'job'"),
        ("DELETE FROM jobs", "the list of its jobs"),
        ("UPDATE groups SET shards = '[]' WHERE name = 'block.1'", "job 'job', step 0,"),
        ("UPDATE slabs SET kind = 'paran' WHERE id = 1", "job 'job', step 0,"),
        ("UPDATE slabs SET placement = 'gpu' WHERE id = 1", "job 'job', step 0,"),
        ("UPDATE files SET directory = '..'", "the list of its jobs, data files"),
        ("UPDATE bad_extents SET reason = ''", "the list of its jobs, data files and bad extents"),
        ("DELETE FROM bad_extents", "the list of its jobs, data files and bad extents"),
        ("UPDATE meta SET value = '0' WHERE key = 'created_at'", "the list of its jobs"),
        ("DELETE FROM meta WHERE key = 'digest'", "the list of its jobs"),
        ("DROP TABLE files", "its tables have changed"),
        ("CREATE TRIGGER t AFTER INSERT ON commits BEGIN DELETE FROM commits; END", "its tables have changed"),
        ("INSERT INTO slabs VALUES (99, 99, 'param', 'float32', 'nvme', NULL)", "refer to others that are not there"),
    ],
)
def test_a_row_that_is_not_what_was_stored_is_data_loss(
    catalog: Catalog, path: Path, statement: str, named: str
) -> None:
    commit(catalog, 0, {key(): (0, extent(1))})
    commit(catalog, 3, {key(): (3, extent(2))})
    catalog.add_bad_extents([BadExtent(extent=Extent(0, 4096), reason="a read failed", found_at=5.5)])
    with closing(sqlite3.connect(path)) as db:
        # The manifest of a step that was rolled back is kept aside, and put back later as damage.
        commit(catalog, 4, {key(): (4, extent(3))})
        db.execute("CREATE TEMP TABLE spare AS SELECT * FROM manifests WHERE step = 4")
        with catalog.transaction():
            catalog.retain("job", [0, 3])
        catalog.close()
        with db:
            db.execute(statement)
    with pytest.raises(DataLossError, match=re.escape(named)) as caught:
        Catalog(path)
    assert f"{path} is damaged" in str(caught.value) and "restore the whole state directory" in str(caught.value)


def test_what_is_damaged_while_the_catalog_is_open_gets_no_new_checksum(catalog: Catalog, path: Path) -> None:
    everything = [key(group, kind) for group in range(2) for kind in LAYOUT.kinds]
    commit(catalog, 0, {name: (0, extent(i)) for i, name in enumerate(everything)})
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE manifests SET entries = zeroblob(length(entries))")
    commit(catalog, 1, {name: (1, extent(10)) for name in everything[:6]})
    with pytest.raises(DataLossError, match=r"damaged while it was in use.*step 0 of job 'job'"), catalog.transaction():
        # Only two of the eight entries are still needed, so the manifest would be rewritten.
        catalog.retain("job", [1])
    with pytest.raises(DataLossError, match="what step 0 of job 'job' wrote"):
        catalog.load()


def test_a_full_disk_is_told_by_the_name_of_the_file_and_what_was_committed_stays(catalog: Catalog, path: Path) -> None:
    commit(catalog, 0, {})
    # SQLite reports the same error for a database at its maximum size as for a full file system.
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
