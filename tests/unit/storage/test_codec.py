"""Encoded slabs: training, restarts, reads, puts, lenders and checks have the bits of torch with rounded states."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.base.codec import CODECS, PLAIN, TILE_QUANTUM, Codec, EncodedLayout, layout_of
from storage.base.errors import ConflictError, InvalidRequestError, NewerFormatError
from storage.base.shard import DType, Kind, TierName
from storage.fsck import check_state
from tests.unit.storage.builders import (
    MIB,
    ON_HOST,
    OPTIMIZER_STATES,
    ROOM_FOR_TILED,
    TILED,
    Layout,
    Training,
    on_nvme,
    opened,
)
from tests.unit.storage.root_codec import ROOT, rounded
from tests.unit.storage.test_remote_tier import go_on, paired, trained
from tests.unit.storage.test_third_tier import evict_all

ENCODED = Layout(numels=TILED, precision=DType.BFLOAT16, codec=ROOT.name)
# The moments of three shards in one slab: as they are, none, and encoded. The last range ends within a record.
RANGES = Layout(
    numels=(131_060, 65_523, 100_003),
    precision=DType.BFLOAT16,
    codec=f"plain@0,absent@131072,{ROOT.name}@196608",
    with_skips=False,
)
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        ENCODED,
        replace(ENCODED, precision=DType.FLOAT32),
        replace(ENCODED, **ON_HOST),
        replace(ENCODED, every_steps=2),
        RANGES,
        replace(RANGES, **ON_HOST),
    ],
    ids=["bf16", "fp32", "host", "snapshot", "ranges", "ranges on the host"],
)


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec.record_bytes], ids=lambda c: c.name)
def test_a_codec_keeps_its_promises(codec: Codec) -> None:
    assert TILE_QUANTUM % codec.record_elements == 0 and CODECS[codec.name] is codec
    assert codec.record_bytes % 4096 == 0 and codec.record_bytes <= 4 * codec.record_elements
    zeros = torch.ones(2, codec.record_elements)
    codec.decode(torch.zeros(2, codec.record_bytes, dtype=torch.uint8), zeros)
    assert not zeros.any()
    generator = torch.Generator().manual_seed(7)
    elements = torch.randn(2, codec.record_elements, generator=generator)
    elements *= 10.0 ** torch.randint(-12, 4, elements.shape, generator=generator)
    first, again = (torch.empty(2, codec.record_bytes, dtype=torch.uint8) for _ in range(2))
    codec.encode(elements, first)
    codec.decode(first, elements)
    codec.encode(elements, again)
    assert torch.equal(first, again)


def test_the_layout_of_a_slab_answers_for_its_bytes() -> None:
    plain = layout_of(PLAIN, 100_000, 2)
    assert (plain.nbytes, plain.element_bytes) == (200_000, 200_000)
    assert plain.bytes_of(10, 20) == slice(20, 40) and plain.elements_of(21, 39) == (10, 20)
    encoded = layout_of(ROOT.name, 100_000, 4)
    assert (encoded.nbytes, encoded.element_bytes) == (2 * ROOT.record_bytes, 400_000)
    assert encoded.block_bytes == ROOT.record_bytes
    assert encoded.bytes_of(65_535, 65_537) == slice(0, 2 * ROOT.record_bytes)
    assert encoded.elements_of(ROOT.record_bytes, 2 * ROOT.record_bytes) == (65_536, 100_000)


def test_a_slab_may_have_a_codec_for_each_range() -> None:
    layout = layout_of(RANGES.codec, 296_624, 4)
    assert isinstance(layout, EncodedLayout) and layout.block_bytes == 4096
    assert layout_of(f"{ROOT.name}@0", 65_536, 4).block_bytes == 4096
    begin = 131_072 * 4
    assert layout.nbytes == begin + 2 * ROOT.record_bytes
    assert layout.bytes_of(131_071, 131_072) == slice(begin - 4096, begin)
    assert layout.bytes_of(131_072, 196_608) == slice(begin, begin)
    assert layout.bytes_of(131_071, 196_609) == slice(begin - 4096, begin + ROOT.record_bytes)
    assert layout.elements_of(begin - 4096, begin + 1) == (131_072 - 1024, 262_144)
    assert layout.elements_of(begin + ROOT.record_bytes, layout.nbytes) == (262_144, 296_624)
    assert layout.keeps(0, 131_072) and not layout.keeps(131_071, 131_073) and layout.keeps(196_608, 296_624)
    # Whole records that fit into a buffer: two of plain elements, and the elements without bytes behind them.
    assert layout.records_within(130_000, 296_624, 2 * 4096 + 1) == (129_024, 196_608)
    assert layout.records_within(130_000, 131_000, 4096) == (129_024, 130_048)
    assert layout.records_within(140_001, 296_624, ROOT.record_bytes) == (140_000, 262_144)
    generator = torch.Generator().manual_seed(3)
    elements = torch.randn(296_624, generator=generator)
    records = memoryview(bytearray(layout.nbytes))
    with pytest.raises(InvalidRequestError, match="codec 'absent' keeps no bytes, so its elements must be zeros"):
        layout.encode(elements, 0, records)
    elements[131_072:196_608] = 0
    layout.encode(elements, 0, records)
    found = torch.ones(296_624)
    layout.decode(records, 0, found)
    expected = torch.cat([elements[:196_608], rounded(elements[196_608:])])
    assert torch.equal(found, expected)
    span = layout.bytes_of(129_024, 262_144)
    layout.decode(records[span], 129_024, part := torch.ones(262_144 - 129_024))
    assert torch.equal(part, expected[129_024:262_144])


@pytest.mark.parametrize(
    "codec",
    [
        "plain@16",
        "plain@0,absent@1000",
        "plain@0,absent@1040",
        "absent@0,plain@16",
        "plain@0,absent@4096,plain@2048",
        "plain@0,absent@8192",
        "absent@0",
        "absent",
    ],
)
def test_ranges_that_do_not_fit_the_slab_are_refused(codec: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"codec '{codec}'"):
        layout_of(codec, 8192, 4)


@pytest.mark.parametrize(
    "codec", ["int3@0,plain@1024", "plain@0,plain", "plain@0,plain@x", "plain@", "@", ",", "plain@-1"]
)
def test_a_table_that_is_not_understood_is_of_a_newer_release(codec: str) -> None:
    with pytest.raises(NewerFormatError, match="written by a newer release, or asked for by one: codec "):
        layout_of(codec, 8192, 4)


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(NewerFormatError, match="written by a newer release, or asked for by one: codec 'int3'"):
        replace(ENCODED, codec="int3").group("block.0").validate()
    with pytest.raises(InvalidRequestError, match="encodes float32, and no elements of 2 bytes"):
        layout_of(ROOT.name, 16, 2)
    group = ENCODED.group("block.0")
    master = replace(group.slab_of_kind[Kind.MASTER], codec=ROOT.name)
    slabs = tuple(master if slab.kind is Kind.MASTER else slab for slab in group.slabs)
    with pytest.raises(InvalidRequestError, match="kind master cannot be encoded"):
        replace(group, slabs=slabs).validate()


@LAYOUTS
async def test_training_and_a_restart_have_the_bits_of_torch_with_rounded_states(
    tmp_path: Path, layout: Layout
) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, layout).begin()
        for step in (1, 2, 3, 4):
            if layout.moments is TierName.NVME:
                evict_all(training)
            await training.step()
            await training.assert_at(step)
        slab = training.job.slab("block.0", Kind.EXP_AVG)
        plain_bytes = 131_072 * 4 if layout.codec == RANGES.codec else ROOT.record_bytes
        assert slab.nbytes == plain_bytes + 2 * ROOT.record_bytes < slab.layout.element_bytes * 3 // 4
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, layout).open()
        await training.assert_goes_on_from(4)


@pytest.mark.parametrize("layout", [replace(ENCODED, numels=(300_000, 100_000)), RANGES], ids=["encoded", "ranges"])
async def test_an_update_in_several_tiles_reads_whole_records_of_its_own(tmp_path: Path, layout: Layout) -> None:
    async with opened(tmp_path, host_budget_bytes=5 * MIB, nvme_budget_bytes=64 * MIB) as engine:
        training = await Training(engine, layout).begin()
        for step in (1, 2):
            evict_all(training)
            await training.step()
            await training.assert_at(step)


@pytest.mark.parametrize("layout", [ENCODED, RANGES], ids=["encoded", "ranges"])
async def test_readers_get_elements_of_any_range_and_a_digest_without_regard_to_the_codec(
    tmp_path: Path, layout: Layout
) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        evict_all(training)
        for index, size in enumerate(layout.numels):
            fqn = f"block.0.weight.{index}"
            expected = training.reference.states(1)["block.0", fqn, Kind.EXP_AVG]
            for offset, numel in ((0, size), (16, 1), (size // 2, size // 3)):
                pieces = [p async for p in engine.reader.read(training.job, fqn, Kind.EXP_AVG, offset, numel)]
                found = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.float32)
                assert torch.equal(found, expected[offset:][:numel])
        _, digest = await engine.reader.digest(training.job, "block.0", Kind.EXP_AVG)
    plain = replace(layout, codec=PLAIN)
    async with opened(tmp_path / "plain", **ROOM_FOR_TILED) as engine:
        other = await Training(engine, plain).open(must_exist=False)
        for group in plain.groups:
            for kind in plain.kinds:
                pin = await engine.pins.stage(other.job, group, kind)
                tensor = engine.host.tensor(pin.arena_range, plain.dtype(kind), pin.slab.numel).zero_()
                for shard in plain.group(group).shards:
                    tensor[shard.group_offset :][: shard.numel] = training.reference.states(1)[group, shard.fqn, kind]
                await engine.pins.publish(pin)
        assert (await engine.reader.digest(other.job, "block.0", Kind.EXP_AVG))[1] == digest


async def test_staged_and_put_elements_are_encoded(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, ENCODED).open(must_exist=False)
        await training.stage_all()
        shard = ENCODED.shards[0]
        values = training.reference.states(3)
        for group in ENCODED.groups:
            for kind in OPTIMIZER_STATES:
                pin = await engine.pins.stage(training.job, group, kind)
                tensor = engine.host.tensor(pin.arena_range, DType.FLOAT32, pin.slab.numel).zero_()
                tensor[: shard.numel] = values[group, f"{group}.weight.0", kind]
                await engine.pins.publish(pin)
        await engine.commit(training.job, 0, {0: b""}, 0)
        staged = await engine.pending_steps.allocate_put(training.job, 1, "block.1", Kind.EXP_AVG)
        tensor = engine.host.tensor(staged, DType.FLOAT32, ENCODED.group("block.1").numel).zero_()
        tensor[: shard.numel] = values["block.0", "block.0.weight.0", Kind.EXP_AVG]
        await engine.pending_steps.put(training.job, 1, "block.1", Kind.EXP_AVG, staged)
        await engine.commit(training.job, 1, {0: b""}, 1)
        evict_all(training)
        for group in ENCODED.groups:
            pin = await engine.pins.fetch(training.job, group, Kind.EXP_AVG)
            found = engine.host.tensor(pin.arena_range, DType.FLOAT32, shard.numel).clone()
            engine.pins.unpin(pin)
            assert torch.equal(found, values["block.0", "block.0.weight.0", Kind.EXP_AVG])


@pytest.mark.parametrize("layout", [ENCODED, RANGES], ids=["encoded", "ranges"])
async def test_a_lender_keeps_records(tmp_path: Path, layout: Layout) -> None:
    async with paired(tmp_path) as pair:
        training = await trained(pair, layout)
        read, hits = pair.borrower.nvme.counters.bytes_read, pair.remote.counters.hits
        assert pair.remote.used_bytes == training.version_bytes
        for _ in range(2):
            await go_on(pair, training)
        assert pair.borrower.nvme.counters.bytes_read == read and pair.remote.counters.hits > hits


async def test_a_check_finds_the_damaged_record_and_names_its_parameters(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, ENCODED).begin()
        await training.step()
        region = on_nvme(training.job.slab("block.1", Kind.EXP_AVG).versions[1])
        found = [(length, error) async for length, error in engine.scrubber.verify(region)]
        assert sum(length for length, _ in found) == region.nbytes and not any(error for _, error in found)
        extent, path = region.extents[0], engine.nvme.files[0].path
    *_, result = check_state(tmp_path)
    assert result.problems == [] and result.verified_bytes == result.total_bytes
    with path.open("r+b") as file:
        file.seek(extent.offset + 2 * ROOT.record_bytes + 100)
        file.write(b"damage")
    *_, result = check_state(tmp_path)
    (problem,) = result.problems
    start, end = 2 * ROOT.record_bytes, 3 * ROOT.record_bytes
    assert problem.startswith(f"job/block.1/exp_avg at step 1: bytes {start} to {end} (block.1.weight.2)")


async def test_a_store_with_an_unknown_codec_is_refused_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, ENCODED).begin()
        await training.step()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock"}
    with monkeypatch.context() as without:
        without.delitem(CODECS, ROOT.name)
        layout_of.cache_clear()
        with pytest.raises(NewerFormatError, match=r"written by a newer release, .*codec 'test-root8'"):
            async with opened(tmp_path, **ROOM_FOR_TILED):
                pass
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        await (await Training(engine, ENCODED).open()).assert_goes_on_from(1)


async def test_a_job_keeps_its_codec(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        await Training(engine, ENCODED).begin()
        with pytest.raises(ConflictError, match="is stored with another layout or precision"):
            await Training(engine, replace(ENCODED, codec=PLAIN)).open()


@pytest.mark.parametrize("verb", ["decode", "encode"])
async def test_a_cancelled_call_frees_its_memory_only_when_the_thread_has_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, ENCODED).begin()
        begun, go_on, work = threading.Event(), threading.Event(), getattr(ROOT, verb)

        def wait(*tensors: torch.Tensor) -> None:
            begun.set()
            go_on.wait()
            work(*tensors)

        if verb == "decode":
            await training.step()
            call: Coroutine[Any, Any, object] = engine.pins.fetch(training.job, "block.0", Kind.EXP_AVG)
        else:
            staged = await engine.pending_steps.allocate_put(training.job, 1, "block.0", Kind.EXP_AVG)
            call = engine.pending_steps.put(training.job, 1, "block.0", Kind.EXP_AVG, staged)
        monkeypatch.setattr(ROOT, verb, wait)
        calling = asyncio.ensure_future(call)
        await asyncio.to_thread(begun.wait)
        ranges = set(engine.scratch.ranges)
        calling.cancel()
        await asyncio.sleep(0.05)
        kept = set(engine.scratch.ranges)
        go_on.set()
        assert ranges and kept == ranges
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert not engine.scratch.ranges
