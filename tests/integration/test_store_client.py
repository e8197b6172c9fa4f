"""trainer_client.StoreClient in its asyncio and its synchronous form, against a real daemon: values, steps, listings
and errors."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest
import torch

from storage.base import shard as engine
from tests.integration.support.daemon import MIB, Daemon, tiers
from tests.integration.support.store_client import Clients
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client import (
    Commit,
    ConfigError,
    InvalidRequestError,
    JobConflictError,
    Kind,
    StoreClient,
    StoreClientSync,
    StoreNotFoundError,
    StoreWriter,
    TensorSpec,
)

SHARD = 1 * MIB
KINDS: dict[engine.Kind, Kind] = {
    engine.Kind.PARAM: "param",
    engine.Kind.MASTER: "master",
    engine.Kind.EXP_AVG: "exp_avg",
    engine.Kind.EXP_AVG_SQ: "exp_avg_sq",
}
SPECS = {
    # The tensor has two shards, and the last one has an odd size.
    "table": TensorSpec(shape=(1100, 513), dtype=torch.bfloat16),
    "bias": TensorSpec(shape=(7,), dtype=torch.float32),
    "scale": TensorSpec(shape=(3, 5, 2), dtype=torch.float16),
}


def value(fqn: str, step: int, spec: TensorSpec | None = None) -> torch.Tensor:
    """Return the values that a tensor has at a step."""
    spec = spec or SPECS[fqn]
    generator = torch.Generator().manual_seed(1000 * step + len(fqn))
    return torch.randn(spec.shape, generator=generator).to(spec.dtype)


def values(step: int) -> dict[str, torch.Tensor]:
    return {fqn: value(fqn, step) for fqn in SPECS}


@pytest.fixture(params=["arena", "streams"])
async def store(daemon: Daemon, request: pytest.FixtureRequest) -> AsyncIterator[StoreClient]:
    async with await StoreClient.connect(daemon.address, prefer_streams=request.param == "streams") as client:
        assert client.maps_memory is (request.param == "arena")
        yield client


@pytest.fixture
def sync_store(daemon: Daemon) -> Iterator[StoreClientSync]:
    with StoreClientSync.connect(daemon.address) as client:
        yield client


async def write(job: StoreWriter, step: int) -> None:
    """Put all tensors of a step and commit it."""
    await job.put(values(step))
    assert await job.commit() == step


async def test_each_step_has_its_values_and_a_reader_keeps_the_one_it_holds(store: StoreClient, job: str) -> None:
    async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
        assert writer.step is None
        await write(writer, 0)
        older = await store.read(job)
        await writer.put({"table": value("table", 1)})
        await writer.put({"bias": value("bias", 1)})
        assert torch.equal(await older.get("table"), value("table", 0)), "a put is not a commit"
        assert await writer.commit() == 1
        await write(writer, 2)
        async with older, await store.read(job) as newer:
            assert [older.step, newer.step, writer.step] == [0, 2, 2]
            for reader in (older, newer):
                for fqn, spec in SPECS.items():
                    got = await reader.get(fqn)
                    assert got.dtype == spec.dtype
                    assert torch.equal(got, value(fqn, reader.step)), fqn
            whole = value("table", 0).reshape(-1)
            for offset, numel in ((0, 10), (17, 30_000), (524_280, 39_900), (524_288, 40_012), (564_299, 1)):
                assert torch.equal(await older.get("table", offset=offset, numel=numel), whole[offset:][:numel])
            assert torch.equal(await older.get("table", offset=560_000), whole[560_000:])
            out = torch.empty(564_300, dtype=torch.bfloat16)
            assert await older.get("table", out=out) is out
            assert torch.equal(out, whole)
        with pytest.raises(ConfigError, match=r"the reader of step 0 .* was closed"):
            await older.get("table")


async def test_what_is_not_put_keeps_its_value_also_for_a_writer_that_comes_later(store: StoreClient, job: str) -> None:
    async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
        await write(writer, 0)
        await writer.put({"bias": value("bias", 1)})
        await writer.commit()
        await writer.put({"scale": value("scale", 5)})
    async with await store.open(job, SPECS, shard_bytes=SHARD) as writer, await store.read(job) as reader:
        assert (writer.step, reader.step) == (1, 1), "what was put and not committed is discarded"
        assert torch.equal(await reader.get("bias"), value("bias", 1))
        assert torch.equal(await reader.get("scale"), value("scale", 0))
        await writer.put({"table": value("table", 3)})
        assert await writer.roll_back() == 1
        await write(writer, 2)
    async with await store.read(job) as reader:
        assert torch.equal(await reader.get("table"), value("table", 2))


def test_the_synchronous_face_does_the_same(sync_store: StoreClientSync, job: str) -> None:
    with sync_store.open(job, values(0), shard_bytes=SHARD) as writer:
        writer.put(values(0), timeout=20.0)
        assert writer.commit(timeout=timedelta(seconds=20)) == 0
        watch = sync_store.watch(job)
        assert next(watch).step == 0
        later = sync_store.watch(job, timeout=0.1)
        time.sleep(0.2)
        assert next(later).step == 0, "the time-out limits only how long the daemon may be away"
        del later
        with sync_store.read(job) as reader:
            writer.put({"bias": value("bias", 1)})
            assert writer.commit() == 1
            commit = next(watch)
            assert commit == Commit(step=1, durable=True, committed_at_unix_seconds=commit.committed_at_unix_seconds)
            assert abs(time.time() - commit.committed_at_unix_seconds) < 60
            reader.prefetch(["table", "bias"])
            for fqn in SPECS:
                assert torch.equal(reader.get(fqn), value(fqn, 0))
        (stored,) = sync_store.list_jobs()
        assert (stored.name, stored.step, stored.durable, stored.world_size) == (job, 1, True, 1)
        for forever in (float("inf"), timedelta.max):
            assert [each.name for each in sync_store.list_jobs(timeout=forever)] == [job]
        tensors = {tensor.fqn: tensor for tensor in sync_store.list_tensors(job)}
        assert {fqn: TensorSpec(shape=t.shape, dtype=t.dtype) for fqn, t in tensors.items()} == SPECS
        assert tensors["table"].held == ((0, 564_300),)
        assert {fqn: tensor.index for fqn, tensor in tensors.items()} == {fqn: i for i, fqn in enumerate(SPECS)}
        assert [tensor.fqn for tensor in sync_store.list_tensors(job, prefix="s")] == ["scale"]


async def test_prefetched_parts_are_in_host_memory_before_they_are_got_and_released_if_they_are_not(
    daemon: Daemon, store: StoreClient, job: str
) -> None:
    async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
        await write(writer, 0)

    def leased() -> int:
        return tiers(daemon.address)[0].leased_bytes

    # The leases of the writer go back shortly after its end.
    await asyncio.to_thread(wait_until, lambda: leased() == 0)
    async with await store.read(job) as reader:
        await reader.prefetch(["table"])
        await asyncio.to_thread(wait_until, lambda: leased() >= 1100 * 513 * 2)
        assert torch.equal(await reader.get("table"), value("table", 0))
        await asyncio.to_thread(wait_until, lambda: leased() == 0)
        await reader.prefetch(["table", "scale"])
    await asyncio.to_thread(wait_until, lambda: leased() == 0)


async def test_a_watcher_is_told_each_commit_and_the_end_of_the_job(
    daemon: Daemon, store: StoreClient, job: str
) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no job"):
        await anext(store.watch(job))
    async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
        watch = store.watch(job)
        await write(writer, 0)
        for step in range(1, 4):
            assert (await anext(watch)).step == step - 1
            await write(writer, step)
        idle = asyncio.ensure_future(anext(store.watch("nothing")))
        with pytest.raises(StoreNotFoundError):
            await idle
        assert (await anext(watch)).step == 3
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_every_get_equals_the_reference_of_its_step_while_a_trainer_trains(
    daemon: Daemon, clients: Clients, job: str
) -> None:
    layout = Layout(name=job, precision=engine.DType.BFLOAT16)
    rank = clients.rank(layout).begin()
    # The reference is computed in advance, because the trainer would otherwise wait while torch computes it.
    rank.reference.states(30)
    stop = threading.Event()

    def train() -> None:
        step = 1
        while not stop.is_set():
            rank.train(step, step)
            step += 1

    trainer = threading.Thread(target=train)
    trainer.start()
    seen: set[int] = set()
    try:
        with StoreClientSync.connect(daemon.address) as store:
            reads, deadline = 0, time.monotonic() + 60
            while reads < 6 or len(seen) < 2:
                assert time.monotonic() < deadline, "all readers have seen the same step"
                reads += 1
                with store.read(job) as reader:
                    seen.add(reader.step)
                    states = rank.reference.states(reader.step)
                    for (_, fqn, kind), expected in states.items():
                        assert torch.equal(reader.get(fqn, kind=KINDS[kind]), expected), f"{fqn} {kind}"
    finally:
        stop.set()
        trainer.join()


async def test_cancelled_calls_leave_no_lease_and_touch_nothing_more(
    daemon: Daemon, store: StoreClient, job: str
) -> None:
    async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
        await write(writer, 0)
        reader = await store.read(job)
        before = [(tier.used_bytes, tier.leased_bytes) for tier in tiers(daemon.address)]
        for turn in range(12):
            out = torch.full((1100, 513), 7.0, dtype=torch.bfloat16)
            getting = asyncio.ensure_future(reader.get("table", out=out))
            await asyncio.sleep(0.001 * (turn % 6))
            if not getting.cancel():
                continue  # The call had ended before it could be cancelled.
            with pytest.raises(asyncio.CancelledError):
                await getting
            untouched = out.clone()
            await asyncio.sleep(0.01)
            assert torch.equal(out, untouched)
        await asyncio.to_thread(
            wait_until, lambda: [(t.used_bytes, t.leased_bytes) for t in tiers(daemon.address)] == before
        )
        putting = asyncio.ensure_future(writer.put(values(1)))
        await asyncio.sleep(0.001)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert await writer.roll_back() == 0
        assert torch.equal(await reader.get("table"), value("table", 0))
        await reader.close()
        await write(writer, 1)


async def test_two_clients_and_many_calls_at_once_in_one_process(daemon: Daemon, store: StoreClient, job: str) -> None:
    async with await StoreClient.connect(daemon.address, client="the other") as other:
        async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
            await write(writer, 0)
            with pytest.raises(JobConflictError, match="is in use by another run"):
                await other.open(job, SPECS, shard_bytes=SHARD)
            mine, theirs = await asyncio.gather(store.read(job), other.read(job))
            async with mine, theirs:
                got = await asyncio.gather(*(reader.get(fqn) for reader in (mine, theirs) for fqn in [*SPECS] * 4))
            for fqn, tensor in zip([*SPECS] * 8, got, strict=True):
                assert torch.equal(tensor, value(fqn, 0))
            await asyncio.gather(*(writer.put({fqn: value(fqn, 1)}) for fqn in SPECS))
            assert await writer.commit() == 1
        async with await other.open(job, SPECS, shard_bytes=SHARD) as writer, await store.read(job) as reader:
            assert writer.step == 1
            for fqn in SPECS:
                assert torch.equal(await reader.get(fqn), value(fqn, 1))


async def test_errors_say_what_is_wrong(store: StoreClient, job: str) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no job 'nothing'"):
        await store.read("nothing")
    with pytest.raises(InvalidRequestError, match="job must be 1 to 1024 bytes"):
        await store.open("", SPECS)
    with pytest.raises(ConfigError, match="'maybe': write 'step'"):
        await store.open(job, SPECS, durability="maybe")
    with pytest.raises(ConfigError, match=r"'t' is of torch.int64; the store keeps"):
        await store.open(job, {"t": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(ConfigError, match=r"'t' of shape .0, 3. has no elements"):
        await store.open(job, {"t": torch.zeros(0, 3)})
    with pytest.raises(ConfigError, match="timeout -1 must be positive"):
        await store.list_jobs(timeout=-1)
    async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
        with pytest.raises(JobConflictError, match="no committed step yet"):
            await store.read(job)
        with pytest.raises(ConfigError, match="opened without a tensor 'extra'"):
            await writer.put({"extra": torch.zeros(3)})
        with pytest.raises(ConfigError, match=r"'bias' is of torch.float32, shape \[8\]; .* shape \[7\]"):
            await writer.put({"bias": torch.zeros(8)})
        await writer.put({"bias": value("bias", 0)})
        with pytest.raises(ConfigError, match="'bias' was put since the last commit"):
            await writer.put({"bias": value("bias", 0)})
        with pytest.raises(JobConflictError, match="has no initial values"):
            await writer.commit()
        assert await writer.roll_back() is None
        await write(writer, 0)
        async with await store.read(job) as reader:
            with pytest.raises(StoreNotFoundError, match="has no tensor 'tabl' on this store"):
                await reader.get("tabl")
            with pytest.raises(StoreNotFoundError, match="has no kind 'master' of tensor 'table'"):
                await reader.get("table", kind="master")
            with pytest.raises(ConfigError, match=r"\[564299, 564301\) are no range"):
                await reader.get("table", offset=564_299, numel=2)
            with pytest.raises(ConfigError, match=r"out is of torch.float32, 7 elements"):
                await reader.get("table", out=torch.zeros(7))
        with pytest.raises(StoreNotFoundError, match="does not hold step 9"):
            await store.read(job, step=9)
    with pytest.raises(ConfigError, match="was closed; open it again"):
        await writer.put(values(1))
    with pytest.raises(ConfigError, match="was closed; open it again"):
        await writer.roll_back()
    with pytest.raises(JobConflictError, match="holds another model"):
        await store.open(job, {"table": SPECS["bias"]}, shard_bytes=SHARD)
    with pytest.raises(JobConflictError, match="stored with another partition"):
        await store.open(job, SPECS, shard_bytes=2 * SHARD)
