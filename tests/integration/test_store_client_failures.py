"""trainer_client.StoreClient with a daemon that is too small for its tensors, stopped, killed, or started again."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.guarded import guarded_daemon
from tests.integration.support.tampering import CutAfter, TamperingProxy
from tests.integration.support.waiting import wait_until
from tests.integration.test_store_client import SHARD, SPECS, value, values, write
from trainer_client import (
    ConfigError,
    Credentials,
    PermissionDeniedError,
    StepAbortedError,
    StoreBudgetError,
    StoreClient,
    StoreClientSync,
    StoreNotFoundError,
    StoreTimeoutError,
    StoreUnavailableError,
    TensorSpec,
    UnauthenticatedError,
)
from trainer_client.client.transport.credentials import NO_CREDENTIALS


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """A stack for daemons that a failing test would leave running."""
    with ExitStack() as stack:
        yield stack


@asynccontextmanager
async def started(state_dir: Path, config: dict[str, Any] | None = None) -> AsyncIterator[Daemon]:
    """Start a daemon and wait until it serves. At the end, kill it if it still runs."""
    daemon = await asyncio.to_thread(Daemon, state_dir, config)
    try:
        yield daemon
    finally:
        await asyncio.to_thread(daemon.kill)


async def test_tensors_may_be_larger_than_the_host_budget(tmp_path: Path) -> None:
    spec = TensorSpec(shape=(5, 1 << 20), dtype=torch.float32)
    async with started(tmp_path / "state", {"host_budget": "8MiB", "nvme_budget": "128MiB"}) as daemon:
        async with await StoreClient.connect(daemon.address) as store:
            async with await store.open("on-nvme", {"large": spec}, shard_bytes=SHARD) as writer:
                for step in range(2):
                    await writer.put({"large": value("large", step, spec)})
                    await writer.commit()
            async with await store.read("on-nvme") as reader:
                await reader.prefetch(["large"])
                large = await reader.get("large")
                assert torch.equal(large, value("large", 1, spec))
                part = await reader.get("large", offset=3, numel=4 << 20)
                assert torch.equal(part, large.reshape(-1)[3:][: 4 << 20])
            with pytest.raises(StoreBudgetError, match="host_budget"):
                await store.open("at-home", {"large": spec}, shard_bytes=SHARD, placement="host")
        assert await asyncio.to_thread(daemon.stop) == 0


class CutAt:
    """A proxy's function that cuts the connection once, at the first bytes that contain a pattern."""

    def __init__(self, pattern: bytes) -> None:
        self.has_cut = False
        self._pattern = pattern

    def __call__(self, data: bytes) -> bytes:
        if self.has_cut or self._pattern not in data:
            return data
        self.has_cut = True
        return b""


class Hold:
    """A proxy's function that keeps all bytes back while it is `closed`."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()

    def __call__(self, data: bytes) -> bytes:
        assert self._is_open.wait(30)
        return data

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()


class CutNext:
    """A proxy's function that cuts the connection at the next bytes after `now` was set."""

    def __init__(self) -> None:
        self.now = threading.Event()

    def __call__(self, data: bytes) -> bytes:
        if self.now.is_set():
            self.now.clear()
            return b""
        return data


async def test_calls_go_on_after_a_broken_connection_and_what_was_put_is_not_lost(
    daemon: Daemon, job: str, tmp_path: Path
) -> None:
    async with (
        await StoreClient.connect(daemon.address) as store,
        await store.open(job, SPECS, shard_bytes=SHARD) as writer,
    ):
        await write(writer, 0)
    often, next_time = CutAfter(300_000, times=3), CutNext()
    with (
        TamperingProxy(tmp_path / "often.sock", daemon.socket, often) as cut_often,
        TamperingProxy(tmp_path / "next.sock", daemon.socket, next_time) as cut_next,
    ):
        async with (
            await StoreClient.connect(cut_often.address, prefer_streams=True) as reading,
            await reading.read(job) as reader,
        ):
            assert torch.equal(await reader.get("table"), value("table", 0))
            assert often.times == 0, "all the breaks have been survived"
            assert reader.step == 0
        async with await StoreClient.connect(cut_next.address) as store:
            async with await store.open(job, SPECS, shard_bytes=SHARD) as writer:
                watch = store.watch(job)
                assert (await anext(watch)).step == 0
                await writer.put(values(1))
                next_time.now.set()
                assert [stored.step for stored in await store.list_jobs()] == [0]
                assert await writer.commit() == 1
                assert (await anext(watch)).step == 1
                await watch.aclose()
            async with await store.read(job) as reader:
                assert torch.equal(await reader.get("table"), value("table", 1))


def test_a_job_is_opened_again_if_the_connection_breaks_meanwhile(daemon: Daemon, job: str, tmp_path: Path) -> None:
    with StoreClientSync.connect(daemon.address) as store, store.open(job, SPECS, shard_bytes=SHARD) as writer:
        writer.put(values(0))
        writer.commit()
    # The name of a pack is in the declaration of the shards, which comes after the daemon has opened the job.
    cut = CutAt(b"[packed 0]")
    with (
        TamperingProxy(tmp_path / "cut.sock", daemon.socket, cut) as proxy,
        StoreClientSync.connect(proxy.address) as store,
        store.open(job, SPECS, shard_bytes=SHARD) as writer,
    ):
        assert cut.has_cut
        writer.put(values(1))
        assert writer.commit() == 1


@pytest.mark.parametrize("call", ["put", "commit"])
def test_a_writer_that_was_silent_for_too_long_is_told_what_is_gone(
    daemon: Daemon, job: str, tmp_path: Path, call: str
) -> None:
    """The daemon has ended the session, and the writer calls before it learns that."""
    hold, name = Hold(), f"writer of {job}"
    with (
        TamperingProxy(tmp_path / "hold.sock", daemon.socket, hold) as proxy,
        StoreClientSync.connect(proxy.address, client=name) as store,
        store.open(job, SPECS, shard_bytes=SHARD) as writer,
        admin_of(daemon.address) as admin,
        ThreadPoolExecutor(1) as thread,
    ):

        def has_session() -> bool:
            listed = admin.ListSessions(admin_pb.ListSessionsRequest(), timeout=10).sessions
            return any(session.client == name for session in listed)

        writer.put(values(0))
        writer.commit()
        writer.put({"bias": value("bias", 1)})
        with hold.closed():
            wait_until(lambda: not has_session())
            begin = (lambda: writer.put({"table": value("table", 1)})) if call == "put" else writer.commit
            called = thread.submit(begin)
            # The request is on its way when the news of the end of the session comes.
            time.sleep(0.5)
        with pytest.raises(StepAbortedError, match=r"put it again|put its tensors again"):
            called.result(30)
        writer.put(values(2))
        assert writer.commit() == 1
    with StoreClientSync.connect(daemon.address) as store, store.read(job) as reader:
        assert torch.equal(reader.get("table"), value("table", 2))


def use_after_the_end(address: str, daemon: Daemon, job: str, credentials: Credentials) -> None:
    """Check that each call of a closed client, and of what it has opened, is refused at once."""
    name = f"client of {job}"
    store = StoreClientSync.connect(address, credentials=credentials, client=name)
    writer = store.open(job, SPECS, shard_bytes=SHARD)
    writer.put(values(0))
    writer.commit()
    reader, watch = store.read(job), store.watch(job)
    assert next(watch).step == 0
    writer.put({"bias": value("bias", 1)})
    store.close()
    # The sessions of the client and of the writer end in order, so that the next writer need not wait.
    assert daemon.log.count(f"session of {name} ended (closed by the client)") == 2
    for refused in (
        lambda: store.list_jobs(timeout=5),
        lambda: store.read(job, timeout=5),
        lambda: store.open("another", SPECS, timeout=5),
        lambda: reader.get("bias", timeout=5),
        lambda: writer.put({"scale": value("scale", 1)}, timeout=5),
        lambda: writer.commit(timeout=5),
        lambda: next(watch),
    ):
        with pytest.raises(ConfigError, match="was closed; connect another"):
            refused()
    for opened in (store, reader, writer):
        opened.close()


def test_a_closed_client_says_so_and_has_ended_its_writers(daemon: Daemon, job: str) -> None:
    use_after_the_end(daemon.address, daemon, job, NO_CREDENTIALS)


def test_a_closed_client_with_a_token_says_so() -> None:
    with guarded_daemon() as guarded:
        use_after_the_end(guarded.address, guarded.daemon, "job", guarded.credentials("operator"))


async def test_a_closed_client_of_asyncio_says_so(daemon: Daemon, job: str) -> None:
    async with await StoreClient.connect(daemon.address) as store:
        writer = await store.open(job, SPECS, shard_bytes=SHARD)
        await write(writer, 0)
        reader = await store.read(job)
        await store.close()
        for refused in (store.list_jobs(), reader.get("bias"), writer.put(values(1))):
            with pytest.raises(ConfigError, match="was closed; connect another"):
                await refused
        await reader.close()
        await writer.close()


def test_a_prefetch_that_the_store_has_refused_does_not_fail_a_later_get(tmp_path: Path) -> None:
    specs = {f"t{number}": TensorSpec(shape=(1 << 18,), dtype=torch.float32) for number in range(12)}
    config: dict[str, Any] = {"host_budget": "8MiB"}
    with (
        Daemon(tmp_path / "state", config) as daemon,
        StoreClientSync.connect(daemon.address) as store,
        store.open("job", specs, shard_bytes=SHARD) as writer,
    ):
        writer.put({fqn: value(fqn, 0, spec) for fqn, spec in specs.items()})
        writer.commit()
    # Only requests of readers are refused after a short time. Those of the writer wait for NVMe.
    config["admission_timeout_seconds"] = 0.3
    with Daemon(tmp_path / "state", config) as daemon, StoreClientSync.connect(daemon.address) as store:
        # Each reader holds up to 2 MiB of parts, so there is no room for those of the last one.
        *others, last = [store.read("job") for _ in range(6)]
        for number, reader in enumerate([*others, last]):
            reader.prefetch([f"t{2 * number}", f"t{2 * number + 1}"])
            time.sleep(0.5)
        for reader in others:
            reader.close()
        assert torch.equal(last.get("t10"), value("t10", 0, specs["t10"]))
        last.close()


def test_a_token_opens_its_jobs_and_no_others() -> None:
    with (
        guarded_daemon() as guarded,
        StoreClientSync.connect(guarded.address, credentials=guarded.credentials("operator")) as operator,
    ):
        with pytest.raises(UnauthenticatedError):
            StoreClientSync.connect(guarded.address, credentials=guarded.credentials("late"))
        for name in ("alice-1", "bob"):
            with operator.open(name, SPECS, shard_bytes=SHARD) as writer:
                writer.put(values(0))
                writer.commit()
        with StoreClientSync.connect(guarded.address, credentials=guarded.credentials("alice")) as alice:
            assert [stored.name for stored in alice.list_jobs()] == ["alice-1"]
            with alice.read("alice-1") as reader:
                assert torch.equal(reader.get("table"), value("table", 0))
            for refused in (
                lambda: alice.read("bob"),
                lambda: alice.list_tensors("bob"),
                lambda: alice.open("bob", SPECS),
                lambda: next(alice.watch("bob")),
                lambda: next(alice.watch("nothing")),
            ):
                with pytest.raises(PermissionDeniedError):
                    refused()


async def test_a_killed_daemon_is_found_again_and_a_writer_is_told_what_is_gone(
    tmp_path: Path, cleanup: ExitStack
) -> None:
    daemon = await asyncio.to_thread(Daemon, tmp_path / "state")
    cleanup.callback(daemon.kill)
    store = await StoreClient.connect(daemon.address)
    writer = await store.open("job", SPECS, shard_bytes=SHARD)
    await write(writer, 0)
    reader = await store.read("job")
    watch = store.watch("job")
    assert (await anext(watch)).step == 0
    await writer.put({"bias": value("bias", 1)})
    daemon.kill()
    for call in (reader.get("bias", timeout=0.5), store.list_jobs(timeout=0.5)):
        with pytest.raises((StoreUnavailableError, StoreTimeoutError)):
            await call
    with Daemon(tmp_path / "state", wait=False) as daemon:
        # The call waits until the daemon serves.
        assert torch.equal(await reader.get("bias"), value("bias", 0))
        with pytest.raises(StepAbortedError, match=r"put for step 1 of job 'job' is gone .bias.: put it again"):
            await writer.put({"scale": value("scale", 1)})
        await write(writer, 1)
        assert (await anext(watch)).step == 1
        daemon.kill()
    async with started(tmp_path / "state") as daemon:
        # Nothing was put since the last commit, so the writer goes on without an error. A newer step has replaced the
        # reader's step.
        await write(writer, 2)
        with pytest.raises(StoreNotFoundError, match=r"step 0 of job 'job' is gone .* open another reader"):
            await reader.get("bias")
        await reader.close()
        async with await store.read("job") as reader:
            assert reader.step == 2
            assert torch.equal(await reader.get("table"), value("table", 2))
        await writer.close()
        await watch.aclose()
        await store.close()
        assert await asyncio.to_thread(daemon.stop) == 0


def test_a_commit_that_the_daemon_does_not_survive_is_resolved(tmp_path: Path, cleanup: ExitStack) -> None:
    """When the daemon is killed around a commit and started again, the store and its writer agree on whether the step
    is committed."""
    daemon = Daemon(tmp_path / "state")
    cleanup.callback(daemon.kill)
    store = StoreClientSync.connect(daemon.address)
    writer = store.open("job", SPECS, shard_bytes=SHARD)
    writer.put(values(0))
    writer.commit()
    writer.put(values(1))

    def restart() -> None:
        nonlocal daemon
        # The kill comes before, in or after the catalog's transaction.
        time.sleep(random.uniform(0, 0.006))
        daemon.kill()
        daemon = Daemon(tmp_path / "state", wait=False)
        cleanup.callback(daemon.kill)

    restarting = threading.Thread(target=restart)
    restarting.start()
    try:
        expected = writer.commit()
    except StepAbortedError:
        expected = 0
    restarting.join()
    assert writer.step == expected
    with store.read("job") as reader:
        assert reader.step == expected
        for fqn in SPECS:
            assert torch.equal(reader.get(fqn), value(fqn, expected))
    writer.put(values(9))
    assert writer.commit() == expected + 1
    writer.close()
    store.close()
    assert daemon.stop() == 0


async def test_deadlines_end_calls_to_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        await StoreClient.connect(f"unix:{tmp_path}/nobody.sock", timeout=0.2)
    async with started(tmp_path / "state") as daemon, await StoreClient.connect(daemon.address) as store:
        writer = await store.open("job", SPECS, shard_bytes=SHARD)
        await write(writer, 0)
        reader = await store.read("job")
        daemon.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            for call in (
                reader.get("table", timeout=0.3),
                store.list_jobs(timeout=0.3),
                writer.put(values(1), timeout=timedelta(milliseconds=300)),
                store.open("another", SPECS, shard_bytes=SHARD, timeout=0.3),
            ):
                with pytest.raises(StoreTimeoutError):
                    await call
            assert time.monotonic() - began < 10
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        assert torch.equal(await reader.get("table"), value("table", 0))
        with pytest.raises(StepAbortedError, match="call roll_back, then put its tensors again"):
            await writer.commit()
        assert await writer.roll_back() == 0
        await write(writer, 1)
        await writer.close()
        await reader.close()
