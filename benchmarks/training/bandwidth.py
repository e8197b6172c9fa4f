"""The disk probe: it measures how long the disk alone takes for the bytes of a step, the I/O roofline of a run.

As many threads as the engine has read and write at the same time, in requests of 4 MiB that bypass the page cache. They
do nothing with the bytes: no checksums, no catalog, no order. So the result is one measurement of the mixed load, not a
sum of two separate ones.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.common.measure import Threads

REQUEST_BYTES = 4 << 20
# The size of each file in requests (1 GiB). Larger loads go over the file again; it is too large for a device's cache.
FILE_REQUESTS = 256


class StepProbe:
    """A context with two files, of which each run reads one while it writes the other.

    Attributes:
        direct: whether the requests bypass the page cache; False if the file system does not support that.
    """

    def __init__(self, directory: Path, read_bytes: int, written_bytes: int, threads: Threads) -> None:
        """Write both files once. The numbers of bytes that a run moves are rounded up to whole requests."""
        with ExitStack() as stack:
            self._pool = stack.enter_context(ThreadPoolExecutor(threads.read + threads.write, "probe"))
            self._read = _Load(directory / "probe-read", read_bytes, threads.read, stack)
            self._written = _Load(directory / "probe-written", written_bytes, threads.write, stack)
            for load in (self._read, self._written):
                _finish(load.begin(self._pool, writes=True))
            self._stack = stack.pop_all()
        self.direct = self._read.direct and self._written.direct

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the files."""
        self._stack.close()

    @property
    def nbytes(self) -> int:
        """The number of bytes that one run moves."""
        return self._read.nbytes + self._written.nbytes

    def run(self) -> float:
        """Move all bytes, in both directions at once, and return the seconds that it took."""
        begun = time.perf_counter()
        _finish([*self._written.begin(self._pool, writes=True), *self._read.begin(self._pool, writes=False)])
        return time.perf_counter() - begun


class _Load:
    """A file, and the number of requests that a run makes to it."""

    def __init__(self, path: Path, nbytes: int, threads: int, stack: ExitStack) -> None:
        """Make the file at `path`. Closing `stack` removes it."""
        self._requests = -(-nbytes // REQUEST_BYTES)
        self._threads = threads
        self._descriptor, self.direct = _opened(path)
        stack.callback(path.unlink)
        stack.callback(os.close, self._descriptor)
        self._buffers = [_buffer() for _ in range(threads)]

    @property
    def nbytes(self) -> int:
        return self._requests * REQUEST_BYTES

    def begin(self, pool: ThreadPoolExecutor, *, writes: bool) -> list[Future[None]]:
        """Start the requests; each of n threads makes every n-th one."""
        return [pool.submit(self._move, first, writes) for first in range(self._threads)]

    def _move(self, first: int, writes: bool) -> None:
        buffer = [self._buffers[first]]
        for number in range(first, self._requests, self._threads):
            offset = number % FILE_REQUESTS * REQUEST_BYTES
            move = os.pwritev if writes else os.preadv
            if (moved := move(self._descriptor, buffer, offset)) != REQUEST_BYTES:
                raise OSError(errno.EIO, f"the probe moved {moved} of {REQUEST_BYTES} bytes at {offset}")


def _opened(path: Path) -> tuple[int, bool]:
    """Return the descriptor of a new file, and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False


def _buffer() -> mmap.mmap:
    """Return a buffer of random bytes, which no device can compress, on huge pages, which give few segments."""
    buffer = mmap.mmap(-1, REQUEST_BYTES)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer[:] = os.urandom(REQUEST_BYTES)
    return buffer


def _finish(futures: Iterable[Future[None]]) -> None:
    """Wait for all futures, and raise the exception of one that failed."""
    for future in wait(futures).done:
        future.result()
