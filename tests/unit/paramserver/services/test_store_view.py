"""The readings that operators, metrics and trainers get are those of what the store does, also while it is doing it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paramserver.dataplane.chunk_budget import ChunkBudget
from paramserver.metrics.families import tier_families
from paramserver.process.loop_watch import LoopWatch
from paramserver.services.store_view import StoreView
from paramserver.services.tracing import read_counters
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind
from storage.engine import Engine
from tests.unit.paramserver.sessions.builders import sessions_of
from tests.unit.storage.builders import MIB, Layout, Training, held, opened
from tests.unit.storage.test_remote_tier import paired, trained
from tests.unit.storage.test_third_tier import evict_all


def view_of(engine: Engine, directory: Path) -> StoreView:
    # The watch is not entered, so it has no thread.
    watch = LoopWatch(asyncio.get_running_loop(), lambda _: None)
    return StoreView(engine, sessions_of(engine), ChunkBudget(MIB, stall_seconds=1.0), watch, "epoch", directory)


def reading_of(view: StoreView, tier: pb.Tier) -> admin_pb.TierInfo:
    (found,) = (one for one in view.tiers().tiers if one.tier == tier)
    return found


async def test_the_time_of_what_is_under_way_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While reads overlap, the clock does not stop, and a rate of bytes over its seconds would be far too high."""
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        view = view_of(engine, tmp_path)
        evict_all(training)
        with held(monkeypatch, "read_exact") as go_on:
            before = reading_of(view, pb.TIER_NVME)
            fetching = asyncio.ensure_future(engine.pins.fetch(training.job, "block.0", Kind.PARAM))
            while not engine.nvme.files[0].io.load.bytes_in_flight:
                await asyncio.sleep(0.001)
            counted = {one.tier: one for one in read_counters(engine).tiers}
            during = reading_of(view, pb.TIER_NVME)
            go_on.set()
            engine.pins.unpin(await fetching)
        assert before.read_seconds < during.read_seconds
        assert before.devices[0].busy_seconds < during.devices[0].busy_seconds
        assert before.read_seconds < counted[pb.TIER_NVME].read_seconds
        assert counted[pb.TIER_HOST].fetch_seconds > 0


async def test_what_lies_with_lenders_can_be_evicted_so_their_memory_is_not_short(tmp_path: Path) -> None:
    """It is filled as far as it goes, and the alert for a full tier leaves out what can be evicted."""
    async with paired(tmp_path) as pair:
        await trained(pair)
        view = view_of(pair.borrower, tmp_path)
        remote = reading_of(view, pb.TIER_REMOTE)
        shown = {family.name: family for family in tier_families(view.tiers().tiers)}
        (told,) = (
            sample.value
            for sample in shown["paramserver_tier_evictable_bytes"].samples
            if sample.labels["tier"] == "remote"
        )
    assert 0 < remote.used_bytes == remote.evictable_bytes == told
