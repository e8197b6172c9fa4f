"""A reader written from FORMAT.md alone finds every step. Format 5 is migrated, and older ones are refused."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from storage.base import codec, failpoints
from storage.base.codec import layout_of
from storage.base.errors import LAST_READER, FormerFormatError
from storage.base.failpoints import Failpoint
from storage.base.shard import DType, TierName
from storage.catalog.catalog import Catalog
from tests.unit.storage.builders import TILED, Layout, Training, opened, quiesce, reference_of
from tests.unit.storage.root_codec import ROOT
from tests.unit.storage.test_codec import RANGES

PAGE, BLOCK = 4096, 131072
# The elements and the bytes of a record of each codec that the stores of these tests have.
RECORDS = {"test-root8": (65536, 81920), "plain": (1024, 4096), "absent": (16, 0)}

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def d(values: Iterable[Any]) -> bytes:
    """Return D(values) as FORMAT.md defines it."""
    encoded = b""
    for value in values:
        if isinstance(value, int):
            encoded += b"i" + struct.pack("<q", value)
        elif isinstance(value, float):
            encoded += b"r" + struct.pack("<d", value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            encoded += (b"t" if isinstance(value, str) else b"b") + struct.pack("<Q", len(raw)) + raw
    return xxhash.xxh3_128_digest(encoded)


def flat(rows: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    return (value for row in rows for value in row)


@dataclass
class StrangersReader:
    """A reader that was written from FORMAT.md alone, without the engine. It verifies all digests and checksums."""

    directory: Path
    # The elements of each slab, by job, committed step, group and kind; zeros for slabs that were never written.
    slabs: dict[tuple[str, int, str, str], torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[str, int], dict[int, bytes]] = field(default_factory=dict)
    # The settled step of each job.
    settled: dict[str, int | None] = field(default_factory=dict)

    def read(self) -> StrangersReader:
        with closing(sqlite3.connect(f"file:{self.directory}/catalog.sqlite?mode=ro", uri=True)) as self.db:
            meta = dict(self.db.execute("SELECT key, value FROM meta ORDER BY key"))
            written = meta.pop("digest")
            assert meta["format_version"] == "6"
            files = self.db.execute("SELECT id, directory FROM files ORDER BY id").fetchall()
            self.files = {n: (self.directory / name / f"data.{n}").read_bytes() for n, name in files}
            bad = self.db.execute(
                "SELECT file, offset, nbytes, reason, found_at FROM bad_extents ORDER BY file, offset"
            ).fetchall()
            jobs = [self.read_job(*row) for row in self.db.execute("SELECT * FROM jobs ORDER BY name").fetchall()]
            assert d([d(flat(meta.items())), d(flat(files)), d(flat(bad)), d(flat(jobs))]).hex() == written
        return self

    def read_job(self, job: int, name: str, *rest: Any) -> tuple[str, bytes]:
        *of_row, written, settled = rest
        row, self.settled[name] = d([name, *of_row]), settled
        groups = self.db.execute("SELECT id, name, numel, shards FROM groups WHERE job = ? ORDER BY id", [job])
        by_id = {row[0]: row for row in groups.fetchall()}
        slabs = [
            slab
            for slab in self.db.execute("SELECT id, grp, kind, dtype, placement, codec FROM slabs ORDER BY id")
            if slab[1] in by_id
        ]
        covered_slabs = (slab if slab[-1] is not None else slab[:-1] for slab in slabs)
        layout = d([d(flat(by_id.values())), d(flat(covered_slabs))])
        checksums, places = self.read_manifests(job, name)
        commits = []
        for step, committed_at, digest in self.db.execute(
            "SELECT step, committed_at, digest FROM commits WHERE job = ? ORDER BY step", [job]
        ).fetchall():
            states = self.db.execute(
                "SELECT rank, state FROM client_states WHERE job = ? AND step = ? ORDER BY rank", [job, step]
            ).fetchall()
            until = d(flat((s, c) for s, c in checksums if s <= step))
            assert digest == d([row, layout, step, committed_at, d(flat(states)), until])
            self.states[name, step] = dict(states)
            commits.append((step, digest))
            for slab, group, kind, dtype, _, codec_name in slabs:
                if kind != "grad":
                    version = max((s for s in places.get(slab, {}) if s <= step), default=None)
                    place = None if version is None else places[slab][version]
                    holder = "\n".join(filter(None, name.split("\n")[:2]))
                    label = f"{holder}/{by_id[group][1]}/{kind} at step {version}"
                    tensor = self.read_slab(label, place, by_id[group][2], TORCH[dtype], codec_name)
                    self.slabs[name, step, by_id[group][1], kind] = tensor
        assert settled is None or settled in dict(commits)
        covered = [row, layout, d(flat(commits)), d(flat(checksums))]
        assert written == d(covered if settled is None else [*covered, settled])
        return name, written

    def read_manifests(self, job: int, name: str) -> tuple[list[tuple[int, bytes]], dict[int, dict[int, Any]]]:
        """Return the manifests' checksums by step, and the place of each version by slab and step."""
        checksums, places = [], dict[int, dict[int, Any]]()
        for step, entries, checksum in self.db.execute(
            "SELECT step, entries, checksum FROM manifests WHERE job = ? ORDER BY step", [job]
        ).fetchall():
            assert checksum == d([name, step, entries])
            checksums.append((step, checksum))
            n_slabs, n_extents, n_blocks = struct.unpack_from("<IIQ", entries)
            slabs = np.frombuffer(entries, "<i8,<u4,<u4", n_slabs, 16)
            extents = np.frombuffer(entries, "<i8", 3 * n_extents, 16 + 16 * n_slabs).reshape(-1, 3).tolist()
            blocks = np.frombuffer(entries, "<u8", n_blocks, 16 + 16 * n_slabs + 24 * n_extents).tolist()
            assert len(entries) == 16 + 16 * n_slabs + 24 * n_extents + 8 * n_blocks
            for slab, extents_of, blocks_of in slabs.tolist():
                place = [extents.pop(0) for _ in range(extents_of)], [blocks.pop(0) for _ in range(blocks_of)]
                assert step not in places.setdefault(slab, {})
                places[slab][step] = place
            assert not extents and not blocks
        return checksums, places

    def read_slab(self, label: str, place: Any, numel: int, dtype: torch.dtype, codec_name: str | None) -> torch.Tensor:
        if place is None:
            return torch.zeros(numel, dtype=dtype)
        region = b""
        for offset, nbytes, file in place[0]:
            assert offset % PAGE == nbytes % PAGE == 0 and offset + nbytes <= len(self.files[file])
            region += self.files[file][offset : offset + nbytes]
        table = [] if codec_name is None else [part.partition("@") for part in codec_name.split(",")]
        firsts = [int(first or 0) for _, _, first in table]
        ends = [*firsts[1:], numel] if table else []
        sizes = [
            -(-(end - first) // RECORDS[name][0]) * RECORDS[name][1]
            for (name, _, _), first, end in zip(table, firsts, ends, strict=True)
        ]
        if codec_name is None:
            block, sizes = BLOCK, [-(-numel * dtype.itemsize // PAGE) * PAGE]
        else:
            block = PAGE if "@" in codec_name else RECORDS[codec_name][1]
        assert len(region) == sum(sizes)
        seed = xxhash.xxh3_64_intdigest(label.encode())
        found = [
            xxhash.xxh3_64_intdigest(region[start : start + block], seed=(seed + i) % (1 << 64))
            for i, start in enumerate(range(0, len(region), block))
        ]
        assert found == place[1], label
        if codec_name is None:
            return torch.frombuffer(bytearray(region), dtype=dtype)[:numel]
        ranges, start = [], 0
        for (name, _, _), first, end, size in zip(table, firsts, ends, sizes, strict=True):
            ranges.append(self.decode_records(name, region[start : start + size], end - first))
            start += size
        return torch.cat(ranges)

    def decode_records(self, name: str, records: bytes, numel: int) -> torch.Tensor:
        """Return the elements of the records of one codec."""
        match name:
            case "absent":
                return torch.zeros(numel)
            case "plain":
                return torch.frombuffer(bytearray(records), dtype=torch.float32)[:numel]
        # The codec of these tests has signed levels of roots, and then the largest root of each 16.
        elements, nbytes = RECORDS[name]
        by_record = np.frombuffer(records, np.uint8).reshape(-1, nbytes)
        codes = by_record[:, :elements].view(np.int8).astype(np.float32).reshape(-1, 16)
        largest = by_record[:, elements:].copy().view("<f4").reshape(-1, 1)
        roots = np.abs(codes) / np.float32(127) * largest
        return torch.from_numpy(roots * roots * np.sign(codes)).flatten()[:numel]


def assert_reads(reader: StrangersReader, layout: Layout, steps: Iterable[int], idle: Iterable[str] = ()) -> None:
    """Check that the reader found exactly these steps of the job, with torch's bits; `idle` groups are as in step 0."""
    assert {step for name, step, *_ in reader.slabs if name == layout.name} == set(steps)
    reference = reference_of(layout)
    for step in steps:
        assert reader.states[layout.name, step] == {0: str(step).encode()}
        for group in layout.groups:
            for shard in layout.group(group).shards:
                for kind in layout.kinds:
                    expected = reference.states(0 if group in idle else step)[group, shard.fqn, kind]
                    stored = reader.slabs[layout.name, step, group, kind.value][shard.group_offset :][: shard.numel]
                    assert torch.equal(stored, expected), (step, shard.fqn, kind)


@pytest.mark.parametrize(
    ("precision", "placements"),
    [
        (DType.FLOAT32, {}),
        (DType.BFLOAT16, {"moments": TierName.HOST}),
        (DType.FLOAT16, {"weights": TierName.HOST, "moments": TierName.HOST}),
        (DType.BFLOAT16, {"codec": ROOT.name}),
        (DType.BFLOAT16, {"codec": RANGES.codec, "numels": RANGES.numels}),
    ],
    ids=["fp32 nvme", "bf16 mixed", "fp16 host", "encoded", "ranges"],
)
async def test_a_reader_written_from_the_page_finds_every_retained_step(
    tmp_path: Path, precision: DType, placements: dict[str, Any]
) -> None:
    steps = Layout(
        name="every \N{SNOWMAN}/step",
        groups=("a", "idle", "b"),
        world_size=2,
        precision=precision,
        **({"numels": TILED} | placements),
    )
    snapshots = Layout(name="a snapshot", every_steps=2, groups=("one",), precision=precision, **placements)
    async with opened(tmp_path, host_budget_bytes=32 << 20, nvme_budget_bytes=64 << 20) as engine:
        first = await Training(engine, steps).begin()
        second = await Training(engine, snapshots).begin()
        for step in (1, 2, 3):
            await first.hand_over(["a", "b"])
            await first.commit(step, settled=step - 1)
            await second.step()
            # Each snapshot must end before the next one is due, because there is one at a time.
            await quiesce(engine)
        reader = await asyncio.to_thread(StrangersReader(tmp_path).read)
        assert reader.settled == {steps.name: 2, snapshots.name: 2}
        await asyncio.to_thread(assert_reads, reader, steps, [2, 3], idle=["idle"])
        await asyncio.to_thread(assert_reads, reader, snapshots, [2])
        # While the store is open, the log has commits that the database file does not have yet.
        assert (tmp_path / "catalog.sqlite-wal").stat().st_size > 0
    assert not (tmp_path / "catalog.sqlite-wal").exists()
    reader = await asyncio.to_thread(StrangersReader(tmp_path).read)
    await asyncio.to_thread(assert_reads, reader, steps, [2, 3], idle=["idle"])
    await asyncio.to_thread(assert_reads, reader, snapshots, [2])


async def test_a_reader_written_from_the_page_finds_kept_steps(tmp_path: Path) -> None:
    layout = Layout(groups=("trained", "idle"))
    async with opened(tmp_path, nvme_budget_bytes=32 << 20) as engine:
        training = await Training(engine, layout).begin()
        for step in (1, 2, 3):
            await training.hand_over(["trained"])
            await training.commit(step)
            await engine.kept_steps.keep(training.job, step, f"the {step}.", note="for people")
        await engine.kept_steps.forget(layout.name, "the 2.")
    reader = await asyncio.to_thread(StrangersReader(tmp_path).read)
    await asyncio.to_thread(assert_reads, reader, layout, [3], idle=["idle"])
    names = {name: f"{layout.name}\n\nthe {name}.\nfor people" for name in (1, 3)}
    assert {name for name, *_ in reader.slabs} == {layout.name, *names.values()}
    for step, name in names.items():
        for group in layout.groups:
            for shard in layout.group(group).shards:
                for kind in layout.kinds:
                    expected = reference_of(layout).states(0 if group == "idle" else step)[group, shard.fqn, kind]
                    stored = reader.slabs[name, step, group, kind.value][shard.group_offset :][: shard.numel]
                    assert torch.equal(stored, expected), (step, shard.fqn, kind)


def migrate(directory: Path) -> None:
    Catalog(directory / "catalog.sqlite").close()


def version_of(directory: Path) -> str:
    with closing(sqlite3.connect(directory / "catalog.sqlite")) as db:
        (version,) = db.execute("SELECT value FROM meta WHERE key = 'format_version'").fetchone()
    return str(version)


ON_TWO_NODES = Layout(name="part", groups=("a",), world_size=2)


async def write_format_5(directory: Path) -> None:
    """Make a state directory of format 5 with the job `Layout()` at step 1, and `ON_TWO_NODES` at step 2."""
    async with opened(directory) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        on_two_nodes = await Training(engine, ON_TWO_NODES).begin()
        await on_two_nodes.step(settled=0)
        await on_two_nodes.step(settled=1)
    with closing(Catalog(directory / "catalog.sqlite")) as catalog, catalog.transaction():
        for job in catalog.load():
            catalog.set_settled(job.spec.stored_as, None)
    with closing(sqlite3.connect(directory / "catalog.sqlite")) as db:
        db.execute("ALTER TABLE jobs DROP COLUMN settled")
        db.execute("ALTER TABLE slabs DROP COLUMN codec")
        db.execute("UPDATE meta SET value = '5' WHERE key = 'format_version'")
        rows = [
            db.execute(f"SELECT {columns} FROM {table} ORDER BY {order}").fetchall()
            for columns, table, order in (
                ("key, value", "meta WHERE key != 'digest'", "key"),
                ("id, directory", "files", "id"),
                ("file, offset, nbytes, reason, found_at", "bad_extents", "file, offset"),
                ("name, digest", "jobs", "name"),
            )
        ]
        db.execute("UPDATE meta SET value = ? WHERE key = 'digest'", (d(d(flat(part)) for part in rows).hex(),))
        db.commit()


async def test_format_5_is_migrated_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await write_format_5(tmp_path)
    data = (tmp_path / "data.0").read_bytes()
    with caplog.at_level("INFO"):
        migrate(tmp_path)
    assert version_of(tmp_path) == "6"
    assert f"{tmp_path}/catalog.sqlite was of format 5 and is of format 6 now" in caplog.text
    reader = await asyncio.to_thread(StrangersReader(tmp_path).read)
    await asyncio.to_thread(assert_reads, reader, Layout(), [1])
    await asyncio.to_thread(assert_reads, reader, ON_TWO_NODES, [1, 2])
    # The store had deleted the steps of each job that are older than the settled one.
    assert reader.settled == {"job": 1, "part": 1}
    assert (tmp_path / "data.0").read_bytes() == data
    caplog.clear()
    migrate(tmp_path)
    assert caplog.text == ""
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).open()
        await training.assert_at(1)
        await engine.kept_steps.keep(training.job, 1, "first")


async def test_a_crash_during_the_migration_leaves_format_5(tmp_path: Path) -> None:
    state, image = tmp_path / "state", tmp_path / "image"
    await write_format_5(state)

    def take_image(reached: Failpoint) -> None:
        if reached is Failpoint.BEFORE_FLIP:
            shutil.copytree(state, image)

    failpoints.install(take_image)
    try:
        migrate(state)
    finally:
        failpoints.install(None)
    assert (version_of(state), version_of(image)) == ("6", "5")
    migrate(image)
    reader = await asyncio.to_thread(StrangersReader(image).read)
    await asyncio.to_thread(assert_reads, reader, Layout(), [1])


HOW_TO_READ = rf"Commit {LAST_READER} is the last one .*`paramserver-admin backup .*`paramserver-admin restore "


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_format_before_5_is_refused_with_the_commit_that_reads_it(tmp_path: Path, version: int) -> None:
    migrate(tmp_path)
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as db, db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'format_version'", (str(version),))
    with pytest.raises(FormerFormatError, match=f"has format version {version}, .* knows 5, 6. {HOW_TO_READ}"):
        migrate(tmp_path)
    assert version_of(tmp_path) == str(version)


async def test_small_blocks_of_formats_before_4_are_refused_also_in_a_later_catalog(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "BLOCK_BYTES", 16384)
        layout_of.cache_clear()
        async with opened(tmp_path) as engine:
            await Training(engine, Layout()).begin()
    layout_of.cache_clear()
    with pytest.raises(FormerFormatError, match=f"at step 0 has [0-9]+ checksums for [0-9]+ bytes.*{HOW_TO_READ}"):
        async with opened(tmp_path):
            pass
