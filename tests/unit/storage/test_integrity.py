"""Damage in data and catalog is detected, named and never returned: flipped bits, swapped and stale blocks.

There are a thousand cases: 600 in the data file and 400 in the catalog. With 40 more, a whole store is opened.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage.base.errors import ConflictError, DataLossError, FormerFormatError
from storage.base.integrity import BLOCK_BYTES, Checksums
from storage.base.shard import DType, Kind, TierName
from storage.catalog.catalog import Catalog
from storage.catalog.records import BadExtent, JobRecord
from storage.engine import Engine
from storage.state.slab import Slab
from storage.tiers.base import PAGE_BYTES
from storage.tiers.extents import Extent
from tests.unit.storage.builders import ROOM_FOR_TILED, TILED, Layout, Training, engine_config, on_nvme, opened, quiesce

LAYOUT = Layout(precision=DType.BFLOAT16, numels=TILED)


def pages(slab: Slab) -> list[int]:
    """Return the offsets in the data file of the pages of the newest version."""
    assert slab.latest is not None
    extents = on_nvme(slab.versions[slab.latest]).extents
    return [offset for e in extents for offset in range(e.offset, e.offset + e.nbytes, PAGE_BYTES)]


async def is_damaged(engine: Engine, training: Training, slab: Slab) -> bool:
    """Read a slab from NVMe, as a whole and in an update's tiles; return whether it is damaged. Errors must name it."""
    engine.host_cache.free_copy(slab)
    try:
        pin = await engine.pins.fetch(training.job, slab.key.group, slab.key.kind)
    except DataLossError as error:
        assert f"{slab.key} at step" in str(error)
        return True
    engine.pins.unpin(pin)
    return False


def page_of(image: bytes, at: int) -> bytes:
    """Return the page at this offset."""
    return image[at : at + PAGE_BYTES]


def data_damage(
    rng: random.Random, data: bytes, old: list[bytes], live: list[int]
) -> Iterator[tuple[str, dict[int, bytes]]]:
    """Yield kinds of damage without end, each with its pages by offset, which replace those of `data`.

    Args:
        rng: the source of all choices.
        data: the data file.
        old: the file after earlier steps.
        live: the offsets of the pages of the newest versions.
    """
    while True:
        kind, at = rng.choice(["flipped", "swapped", "stale"]), rng.choice(live)
        page, other = page_of(data, at), rng.choice(live)
        if kind == "flipped":
            bit = rng.randrange(PAGE_BYTES * 8)
            flipped = page[bit // 8] ^ (1 << bit % 8)
            yield kind, {at: page[: bit // 8] + bytes([flipped]) + page[bit // 8 + 1 :]}
        elif kind == "swapped":
            yield kind, {at: page_of(data, other), other: page}
        else:
            # The place has its old bytes (a lost write), or old bytes of another place (a misdirected write).
            yield kind, {at: page_of(rng.choice(old), rng.choice([at, other]))}


async def test_damaged_swapped_and_stale_blocks_are_found_and_their_shard_is_named(tmp_path: Path) -> None:
    rng, old = random.Random(1), list[bytes]()
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(precision=DType.BFLOAT16, numels=(72_003, 17, 32_000))).begin()
        for _ in range(4):
            old.append(engine.nvme.files[0].path.read_bytes())
            await training.step()
        data = engine.nvme.files[0].path.read_bytes()
        owners = {page: slab for slab in training.job.slabs() for page in pages(slab)}
        cases = data_damage(rng, data, old, list(owners))
        found: Counter[str] = Counter()
        with engine.nvme.files[0].path.open("r+b", buffering=0) as file:

            def write(position: int, page: bytes) -> None:
                file.seek(position)
                file.write(page)

            while found.total() < 600:
                kind, damage = next(cases)
                damage = {at: page for at, page in damage.items() if page_of(data, at) != page}
                for at, page in damage.items():
                    write(at, page)
                for at in damage:
                    assert await is_damaged(engine, training, owners[at]), (kind, at)
                    found[kind] += 1
                for at in damage:
                    write(at, page_of(data, at))
        assert min(found.values()) > 100 and len(found) == 3
        await training.assert_at(4)


async def test_an_update_never_uses_damaged_states(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        slab = next(slab for slab in training.job.slabs() if slab.key.kind is Kind.MASTER)
        engine.host_cache.free_copy(slab)
        with engine.nvme.files[0].path.open("r+b") as file:
            file.seek(pages(slab)[-1])
            page = file.read(PAGE_BYTES)
            file.seek(pages(slab)[-1])
            file.write(bytes(PAGE_BYTES))
            file.flush()
            with pytest.raises(DataLossError, match="at step 1"):
                await training.step()
            await engine.roll_back(training.job, 1)
            file.seek(pages(slab)[-1])
            file.write(page)
        await training.assert_at(1)


@pytest.fixture
async def images(tmp_path: Path) -> list[bytes]:
    """The catalogs of a store with two jobs after each of three sessions. The last one is still the store's."""
    steps = Layout(name="steps", groups=("a", "idle", "b"), world_size=2, precision=DType.BFLOAT16)
    snapshots = Layout(name="snapshots", every_steps=2, groups=("one",), moments=TierName.HOST)
    images = list[bytes]()
    for session in range(3):
        async with opened(tmp_path, host_budget_bytes=8 << 20) as engine:
            first, second = Training(engine, steps), Training(engine, snapshots)
            for training in (first, second):
                await (training.open() if session else training.begin())
            for _ in range(2):
                step = first.job.next_step
                await first.hand_over(["a", "b"])
                await engine.commit(first.job, step, {0: bytes([step]) * 6000}, step - 1)
                await second.step()
                await quiesce(engine)
        with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
            found = BadExtent(extent=Extent(session << 14, 1 << 14, 1), reason="unreadable", found_at=session)
            catalog.add_bad_extents([found])
            catalog.add_file(f"/mnt/disk {session}")
        images.append((tmp_path / "catalog.sqlite").read_bytes())
    return images


def catalog_damage(rng: random.Random, images: list[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield kinds of damage without end, each with the newest of `images` after it."""
    # SQLite's pages have the same size as the store's.
    good, size = images[-1], PAGE_BYTES
    while True:
        kind, damaged = rng.choice(["flipped", "flipped", "swapped", "stale", "zeroed", "cut off"]), bytearray(good)
        first, second = (size * rng.randrange(len(good) // size) for _ in range(2))
        if kind == "flipped":
            bit = rng.randrange(len(good) * 8)
            damaged[bit // 8] ^= 1 << bit % 8
        elif kind == "swapped":
            damaged[first : first + size] = page_of(good, second)
            damaged[second : second + size] = page_of(good, first)
        elif kind == "stale":
            page = page_of(rng.choice(images[:-1]), first)
            damaged[first : first + len(page)] = page
        elif kind == "zeroed":
            damaged[first : first + size] = bytes(size)
        else:
            del damaged[first:]
        if damaged != good:
            yield kind, bytes(damaged)


Contents = tuple[list[JobRecord], dict[int, str], tuple[BadExtent, ...]]


def contents(path: Path) -> Contents:
    """Return all contents of the catalog."""
    with closing(Catalog(path)) as catalog:
        return catalog.load(), catalog.files(), catalog.bad_extents()


def test_a_damaged_catalog_is_refused_or_gives_exactly_what_was_stored(tmp_path: Path, images: list[bytes]) -> None:
    path = tmp_path / "catalog.sqlite"
    stored = contents(path)
    assert path.read_bytes() == images[-1], "opening changes nothing"
    cases, refused = catalog_damage(random.Random(2), images), Counter[str]()
    for _ in range(400):
        kind, damaged = next(cases)
        path.write_bytes(damaged)
        try:
            # A flipped bit in unused bytes of the file changes nothing.
            assert contents(path) == stored, kind
        except (DataLossError, ConflictError) as error:
            assert str(path) in str(error)
            refused[kind] += 1
    assert set(refused) == {"flipped", "swapped", "stale", "zeroed", "cut off"} and refused.total() > 100, refused


async def test_a_store_with_a_damaged_catalog_is_refused_or_has_exactly_what_was_stored(
    tmp_path: Path, images: list[bytes]
) -> None:
    path = tmp_path / "catalog.sqlite"
    cases, refused = catalog_damage(random.Random(3), images), 0
    for _ in range(40):
        kind, damaged = next(cases)
        path.write_bytes(damaged)
        try:
            engine = await Engine.open(engine_config(tmp_path, host_budget_bytes=8 << 20))
        except (DataLossError, ConflictError):
            refused += 1
            continue
        try:
            held = {name: sorted(job.retained) for name, job in engine.jobs.by_name.items()}
            assert held == {"steps": [5, 6], "snapshots": [6]}, kind
            for slab in (slab for job in engine.jobs.by_name.values() for slab in job.slabs() if slab.versions):
                engine.pins.unpin(await engine.pins.fetch(engine.jobs.job(slab.key.job), slab.key.group, slab.key.kind))
        finally:
            await engine.close()
    assert 10 < refused < 40


def test_checksums_that_do_not_fit_their_region_are_of_a_former_format() -> None:
    with pytest.raises(FormerFormatError, match=f"a slab has 1 checksums for {2 * BLOCK_BYTES} bytes, and not 2"):
        Checksums("a slab", 2 * BLOCK_BYTES, stored=bytes(8))


def test_parts_of_blocks_cannot_be_verified() -> None:
    checksums = Checksums("a slab", 2 * BLOCK_BYTES + PAGE_BYTES)
    checksums.record(0, memoryview(bytes(2 * BLOCK_BYTES + PAGE_BYTES)))
    checksums.verify(2 * BLOCK_BYTES, memoryview(bytes(PAGE_BYTES)))
    for offset, length in ((0, PAGE_BYTES), (PAGE_BYTES, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES)):
        with pytest.raises(ValueError, match="not whole blocks"):
            checksums.verify(offset, memoryview(bytes(length)))
