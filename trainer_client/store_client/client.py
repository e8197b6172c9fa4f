"""The store client for asyncio programs that do not train: they put tensors, commit them as steps and read them back.

Each call runs a method of `client_sync` on a thread of this client. grpc.aio is not used, because it would be a second
event loop in the process and copies of tensors would block it. A cancelled call stops using the caller's tensors and
leaves no lease behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from trainer_client.errors import ConfigError
from trainer_client.store_client.client_sync import StoreClientSync
from trainer_client.store_client.connection import Call, Timeout
from trainer_client.store_client.reader import StoreReaderSync
from trainer_client.store_client.types import Commit, Kind, Placement, StoredJob, StoredTensor, TensorSpec
from trainer_client.store_client.writer import DEFAULT_SHARD_BYTES, StoreWriterSync
from trainer_client.transport.channel import COMMIT_DEADLINE_SECONDS, CONTROL_DEADLINE_SECONDS, LEASE_DEADLINE_SECONDS
from trainer_client.transport.credentials import Credentials

# The number of calls that run at once; further calls wait for a thread.
_THREADS = 16

T = TypeVar("T")


class _Threads:
    """The thread pool that runs blocking calls of the client of `address` for the event loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._pool = ThreadPoolExecutor(_THREADS, "paramserver-store")
        self._is_closed = False

    async def run(self, call: Call, work: Callable[[], T], *, close: Callable[[T], None] | None = None) -> T:
        """Run `work` on a thread and return its result.

        If the task is cancelled, cancel `call`, wait until `work` does not touch the caller's tensors any more, and
        raise CancelledError. If `work` still returns a result later, `close` closes it.

        Raises:
            ConfigError: the client was closed.
        """
        if self._is_closed:
            raise ConfigError(f"the client of {self._address} was closed; connect another")
        future = self._pool.submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            call.cancel()
            future.add_done_callback(lambda done: _close_result(done, close))
            await asyncio.shield(asyncio.to_thread(call.wait_for_memory))
            raise

    async def close(self, work: Callable[[], None]) -> None:
        """Run `work` as the last call, and end the threads. A repeated call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        last = self._pool.submit(work)
        self._pool.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(last))


class StoreClient:
    """A connection to a store daemon; `StoreClientSync` documents the calls, their arguments and errors."""

    def __init__(self, client: StoreClientSync, threads: _Threads) -> None:
        """Wrap an open client; users call `connect`."""
        self._client = client
        self._threads = threads

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        credentials: Credentials | None = None,
        client: str | None = None,
        prefer_streams: bool = False,
        timeout: Timeout = None,
    ) -> StoreClient:
        """Connect, and wait until the daemon answers. It raises what `StoreClientSync.connect` raises."""
        threads, call = _Threads(address), Call(timeout, CONTROL_DEADLINE_SECONDS)
        connected = await threads.run(
            call,
            lambda: StoreClientSync.connect_within(call, address, credentials, client, prefer_streams=prefer_streams),
            close=StoreClientSync.close,
        )
        return cls(connected, threads)

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the client, and with it all readers and writers that are still open; see `StoreClientSync.close`."""
        await self._threads.close(self._client.close)

    @property
    def maps_memory(self) -> bool:
        """Whether tensors are copied from and to the daemon's memory; otherwise gRPC sends them."""
        return self._client.maps_memory

    async def list_jobs(self, *, timeout: Timeout = None) -> list[StoredJob]:
        """Return the jobs that this client may read, sorted by name.

        It raises what `StoreClientSync.list_jobs` raises.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        return await self._threads.run(call, lambda: self._client.list_jobs_within(call))

    async def list_tensors(self, job: str, *, prefix: str = "", timeout: Timeout = None) -> list[StoredTensor]:
        """Return the tensors of a job whose names begin with `prefix`.

        It raises what `StoreClientSync.list_tensors` raises.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        return await self._threads.run(call, lambda: self._client.list_tensors_within(call, job, prefix))

    async def open(
        self,
        job: str,
        tensors: Mapping[str, TensorSpec | torch.Tensor],
        *,
        durability: str = "step",
        placement: Placement = "nvme",
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        timeout: Timeout = None,
    ) -> StoreWriter:
        """Open a job for writing, and create it if it does not exist. It raises what `StoreClientSync.open` raises."""
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        writer = await self._threads.run(
            call,
            lambda: self._client.open_within(
                call, job, tensors, durability=durability, placement=placement, shard_bytes=shard_bytes
            ),
            close=StoreWriterSync.close,
        )
        return StoreWriter(writer, self._threads)

    async def read(
        self, job: str, *, step: int | None = None, settled: bool = True, timeout: Timeout = None
    ) -> StoreReader:
        """Open a reader of a committed step, by default the newest one that all nodes of the job have.

        The arguments and errors are those of `StoreClientSync.read`.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        reader = await self._threads.run(
            call, lambda: self._client.read_within(call, job, step, settled=settled), close=StoreReaderSync.close
        )
        return StoreReader(reader, self._threads)

    async def watch(self, job: str, *, settled: bool = True, timeout: Timeout = None) -> AsyncGenerator[Commit, None]:
        """Yield the newest settled step of a job, then each step as it is settled.

        The arguments and errors are those of `StoreClientSync.watch`.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Commit | BaseException] = asyncio.Queue()

        def tell(item: Commit | BaseException) -> None:
            # If the event loop is closed, it raises RuntimeError. Then no task waits for the item.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        def listen() -> None:
            try:
                for commit in self._client.watch_within(call, job, settled=settled):
                    tell(commit)
            except BaseException as error:
                tell(error)

        # The watch has a thread of its own, because it would occupy one of the pool for as long as it lasts.
        threading.Thread(target=listen, name="paramserver-watch", daemon=True).start()
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            call.cancel()


class StoreWriter:
    """A job that is open for writing; see StoreWriterSync."""

    def __init__(self, writer: StoreWriterSync, threads: _Threads) -> None:
        """Wrap an open writer; users call `StoreClient.open`."""
        self._writer = writer
        self._threads = threads

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._writer.name

    @property
    def step(self) -> int | None:
        """The newest committed step; None if nothing is committed yet."""
        return self._writer.step

    async def __aenter__(self) -> StoreWriter:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session; tensors that were put but not committed are discarded."""
        await asyncio.shield(asyncio.to_thread(self._writer.close))

    async def put(self, tensors: Mapping[str, torch.Tensor], *, timeout: Timeout = None) -> None:
        """Put values of tensors for the next step. If cancelled, abandon the step.

        It raises what `StoreWriterSync.put` raises.
        """
        call = Call(timeout, LEASE_DEADLINE_SECONDS)
        await self._threads.run(call, lambda: self._writer.put_within(call, tensors))

    async def commit(self, *, timeout: Timeout = None) -> int:
        """Commit the values that were put as the next step, and return the step's number.

        It raises what `StoreWriterSync.commit` raises.
        """
        call = Call(timeout, COMMIT_DEADLINE_SECONDS)
        return await self._threads.run(call, lambda: self._writer.commit_within(call))

    async def roll_back(self, *, timeout: Timeout = None) -> int | None:
        """Discard the values that were put since the last commit, and return the newest committed step.

        It raises what `StoreWriterSync.roll_back` raises.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        return await self._threads.run(call, lambda: self._writer.roll_back_within(call))


class StoreReader:
    """A reader of one committed step; see StoreReaderSync."""

    def __init__(self, reader: StoreReaderSync, threads: _Threads) -> None:
        """Wrap an open reader; users call `StoreClient.read`."""
        self._reader = reader
        self._threads = threads

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._reader.job

    @property
    def step(self) -> int:
        """The step that is read."""
        return self._reader.step

    async def __aenter__(self) -> StoreReader:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the reader; the store may then delete the step."""
        await asyncio.shield(asyncio.to_thread(self._reader.close))

    async def tensors(self, prefix: str = "", *, timeout: Timeout = None) -> list[StoredTensor]:
        """Return the tensors whose names begin with `prefix`. It raises what `StoreReaderSync.tensors` raises."""
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        return await self._threads.run(call, lambda: self._reader.tensors_within(call, prefix))

    async def get(
        self,
        fqn: str,
        *,
        kind: Kind = "param",
        offset: int | None = None,
        numel: int | None = None,
        out: torch.Tensor | None = None,
        timeout: Timeout = None,
    ) -> torch.Tensor:
        """Return a tensor, or a range of it, as it was at the step. Arguments and errors: see StoreReaderSync.get."""
        call = Call(timeout, LEASE_DEADLINE_SECONDS)
        return await self._threads.run(
            call, lambda: self._reader.get_within(call, fqn, kind=kind, offset=offset, numel=numel, out=out)
        )

    async def get_many(
        self, fqns: Iterable[str], *, kind: Kind = "param", timeout: Timeout = None
    ) -> dict[str, torch.Tensor]:
        """Return tensors as they were at the step, by name. It raises what `StoreReaderSync.get_many` raises."""
        call = Call(timeout, LEASE_DEADLINE_SECONDS)
        wanted = list(fqns)
        return await self._threads.run(call, lambda: self._reader.get_many_within(call, wanted, kind))

    async def prefetch(self, fqns: Iterable[str], *, kind: Kind = "param", timeout: Timeout = None) -> None:
        """Let the store bring tensors into its host memory ahead of `get`.

        It raises what `StoreReaderSync.prefetch` raises.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        wanted = list(fqns)
        await self._threads.run(call, lambda: self._reader.prefetch_within(call, wanted, kind))


def _close_result(done: Future[T], close: Callable[[T], None] | None) -> None:
    """Close the result of a call whose task was cancelled, if the call has succeeded."""
    if done.cancelled() or isinstance(done.exception(), Exception):
        return
    if close is not None:
        close(done.result())
