"""trainer_client.StoreClient with a daemon of its own: small, stopped, killed, and started again."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.daemon import Daemon
from tests.integration.test_store_client import SHARD, SPECS, value, values, write
from trainer_client import (
    StepAbortedError,
    StoreBudgetError,
    StoreClient,
    StoreClientSync,
    StoreNotFoundError,
    StoreTimeoutError,
    StoreUnavailableError,
    TensorSpec,
)


@asynccontextmanager
async def started(state_dir: Path, config: dict[str, Any] | None = None) -> AsyncIterator[Daemon]:
    """A daemon that serves; killed at the end, if it still runs."""
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


@pytest.mark.timeout(120)
async def test_a_killed_daemon_is_found_again_and_a_writer_is_told_what_is_gone(tmp_path: Path) -> None:
    daemon = await asyncio.to_thread(Daemon, tmp_path / "state")
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
        # Waits until the daemon is there.
        assert torch.equal(await reader.get("bias"), value("bias", 0))
        with pytest.raises(StepAbortedError, match=r"put for step 1 of job 'job' is gone .bias.: put it again"):
            await writer.put({"scale": value("scale", 1)})
        await write(writer, 1)
        assert (await anext(watch)).step == 1
        daemon.kill()
    async with started(tmp_path / "state") as daemon:
        # Nothing was put: the writer goes on by itself. The reader's step has been replaced by a newer one.
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


@pytest.mark.timeout(120)
def test_a_commit_that_the_daemon_does_not_survive_is_resolved(tmp_path: Path) -> None:
    """Killed at instants around a commit and started again, the store and the writer agree on whether it is there."""
    daemon = Daemon(tmp_path / "state")
    store = StoreClientSync.connect(daemon.address)
    writer = store.open("job", SPECS, shard_bytes=SHARD)
    outcomes = []
    for delay in (0.0, 0.004):
        step = 0 if writer.step is None else writer.step + 1
        writer.put(values(step))

        def restart(delay: float = delay) -> None:
            nonlocal daemon
            time.sleep(delay)
            daemon.kill()
            daemon = Daemon(tmp_path / "state", wait=False)

        restarting = threading.Thread(target=restart)
        restarting.start()
        try:
            assert writer.commit() == step
            outcomes.append(True)
        except StepAbortedError:
            outcomes.append(False)
        restarting.join()
        daemon.wait_until_serving()
        expected = step if outcomes[-1] else writer.step
        if expected is not None:
            with store.read("job") as reader:
                assert reader.step == expected
                for fqn in SPECS:
                    assert torch.equal(reader.get(fqn), value(fqn, expected))
    print(f"committed: {outcomes}")
    writer.put(values(9))
    writer.commit()
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
