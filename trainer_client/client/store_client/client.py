"""The store client for asyncio programs that do not train: they put tensors, commit them as steps and read them back.

Each call runs a method of `client_sync` on a thread of this client. grpc.aio is not used, because it would be a second
event loop in the process and copies of tensors would block it. A cancelled call stops using the caller's tensors and
leaves no lease behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import torch

from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.connection import Call, Timeout
from trainer_client.client.store_client.reader import StoreReaderSync
from trainer_client.client.store_client.types import Commit, Placement, TensorSpec
from trainer_client.client.store_client.writer import DEFAULT_SHARD_BYTES, StoreWriterSync
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import ConfigError

# The number of the client's calls that run at once. Each takes a thread of the client's pool, and further calls wait
# for a free thread.
_THREADS = 16

T = TypeVar("T")
P = ParamSpec("P")
SyncT = TypeVar("SyncT", bound=StoreClientSync | StoreReaderSync | StoreWriterSync)


class _Threads:
    """The threads on which a StoreClient runs the calls of its blocking client, so that the event loop goes on.

    `address` is the daemon's address, for the texts of errors.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._pool = ThreadPoolExecutor(_THREADS, "paramserver-store")
        self._is_closed = False

    async def run(self, timeout: Timeout, work: Callable[[Call], T], *, close: Callable[[T], None] | None = None) -> T:
        """Run `work` on a thread, as a call with the deadline `timeout`, and return its result.

        If the task is cancelled, cancel the call, wait until `work` does not touch the caller's tensors any more, and
        raise CancelledError. If `work` still returns a result later, `close` closes it.

        Raises:
            ConfigError: the client was closed, or the timeout is not positive.
        """
        call = Call(timeout)
        if self._is_closed:
            raise ConfigError(f"the client of {self._address} was closed; connect another")
        future = self._pool.submit(work, call)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            call.cancel()
            future.add_done_callback(lambda done: _close_result(done, close))
            await asyncio.shield(asyncio.to_thread(call.wait_for_memory))
            raise

    async def close(self, work: Callable[[], None]) -> None:
        """Run `work`, which closes the blocking client, as the last call, and end the threads. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        last = self._pool.submit(work)
        self._pool.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(last))


class _Face(Generic[SyncT]):
    """The base of StoreClient, StoreReader and StoreWriter, the classes for asyncio programs.

    Each object of them wraps an object of the blocking client, which does the work, and closes it at the end of an
    `async with` block.
    """

    def __init__(self, sync: SyncT, threads: _Threads) -> None:
        """Wrap `sync`, an open blocking client, reader or writer. Users call `StoreClient.connect` instead."""
        self._sync = sync
        self._threads = threads

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the wrapped client, reader or writer. A repeated call has no effect."""
        await asyncio.shield(asyncio.to_thread(self._sync.close))


def _awaited(
    method: Callable[Concatenate[SyncT, P], T],
) -> Callable[Concatenate[_Face[SyncT], P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs a blocking method on a thread.

    It has the arguments, the result and the errors of the method, which takes a `timeout`.
    """

    async def awaited(self: _Face[SyncT], *arguments: Any, timeout: Timeout = None, **options: Any) -> T:
        work: Callable[..., T] = method
        return await self._threads.run(timeout, lambda call: work(self._sync, *arguments, timeout=call, **options))

    return cast(
        "Callable[Concatenate[_Face[SyncT], P], Coroutine[Any, Any, T]]", functools.update_wrapper(awaited, method)
    )


class StoreClient(_Face[StoreClientSync]):
    """A connection to a store daemon; `StoreClientSync` documents the calls, their arguments and errors."""

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
        threads = _Threads(address)
        connected = await threads.run(
            timeout,
            lambda call: StoreClientSync.connect(
                address, credentials=credentials, client=client, prefer_streams=prefer_streams, timeout=call
            ),
            close=StoreClientSync.close,
        )
        return cls(connected, threads)

    async def close(self) -> None:
        """Close the client, and all its readers and writers that are still open; see `StoreClientSync.close`."""
        await self._threads.close(self._sync.close)

    @property
    def maps_memory(self) -> bool:
        """Whether this client copies tensors from and to the daemon's shared memory. If not, gRPC sends them."""
        return self._sync.maps_memory

    list_jobs = _awaited(StoreClientSync.list_jobs)
    list_tensors = _awaited(StoreClientSync.list_tensors)

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
        writer = await self._threads.run(
            timeout,
            lambda call: self._sync.open(
                job, tensors, durability=durability, placement=placement, shard_bytes=shard_bytes, timeout=call
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
        reader = await self._threads.run(
            timeout,
            lambda call: self._sync.read(job, step=step, settled=settled, timeout=call),
            close=StoreReaderSync.close,
        )
        return StoreReader(reader, self._threads)

    async def watch(self, job: str, *, settled: bool = True, timeout: Timeout = None) -> AsyncGenerator[Commit, None]:
        """Yield the newest settled step of a job, then each step as it is settled.

        The arguments and errors are those of `StoreClientSync.watch`.
        """
        call = Call(timeout)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Commit | BaseException] = asyncio.Queue()

        def tell(item: Commit | BaseException) -> None:
            # `call_soon_threadsafe` raises RuntimeError if the event loop is closed. The RuntimeError is ignored,
            # because no task of a closed loop waits for commits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        def listen() -> None:
            try:
                for commit in self._sync.watch(job, settled=settled, timeout=call):
                    tell(commit)
            except BaseException as error:
                tell(error)

        # Each watch of a job gets a thread of its own, because a watch would occupy a thread of the client's pool for
        # as long as it lasts.
        threading.Thread(target=listen, name="paramserver-watch", daemon=True).start()
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            call.cancel()


class StoreWriter(_Face[StoreWriterSync]):
    """A job that is open for writing; see StoreWriterSync. A cancelled `put` abandons the step."""

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._sync.name

    @property
    def step(self) -> int | None:
        """The number of the job's newest committed step; None if no step is committed yet."""
        return self._sync.step

    put = _awaited(StoreWriterSync.put)
    commit = _awaited(StoreWriterSync.commit)
    roll_back = _awaited(StoreWriterSync.roll_back)


class StoreReader(_Face[StoreReaderSync]):
    """A reader of one committed step; see StoreReaderSync."""

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._sync.job

    @property
    def step(self) -> int:
        """The number of the step that this reader reads."""
        return self._sync.step

    tensors = _awaited(StoreReaderSync.tensors)
    get = _awaited(StoreReaderSync.get)
    get_many = _awaited(StoreReaderSync.get_many)
    prefetch = _awaited(StoreReaderSync.prefetch)


def _close_result(done: Future[T], close: Callable[[T], None] | None) -> None:
    """Call `close` with the result of a call whose task was cancelled. Do nothing if the call has failed."""
    if done.cancelled() or isinstance(done.exception(), Exception):
        return
    if close is not None:
        close(done.result())
