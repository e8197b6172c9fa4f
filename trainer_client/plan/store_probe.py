"""The probe of a store's work: reads and writes of files in a directory, and updates of optimizer states.

The memory that is read, written and updated is in huge pages wherever the kernel can collapse it, as a daemon's arena
is. In pages of 4 KiB, an NVMe device reads large requests at half of its rate, and an update takes twice as long. So
rates that are measured in pages of 4 KiB would be wrong for a store.

This module owns the files and the memory that it makes, and removes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.update import update_shards
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import ConfigError

_REQUEST_BYTES = 4 << 20
# The bytes of the buffer of a thread that reads or writes NVMe; its requests use the buffer's parts in turn. The buffer
# is larger than one request, because a store's slabs and tiles do not stay in the processor's caches, either.
_BUFFER_BYTES = 4 * _REQUEST_BYTES
_FILE_BYTES = 512 << 20
# The numbers of threads that read and that write NVMe in the probe, as in a daemon.
_READERS, _WRITERS = 4, 2
# Each rate of the probe is the median of this many turns. A turn for NVMe measures reads, then writes, then both. So a
# disturbance of a second spoils one sample of each rate, and not all samples of one rate.
_TURNS = 3
_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
# The elements that all threads of the probe together update while they are timed: fp32 arrays of 64 MiB. The arrays are
# larger than the processor's caches, because in training the states have left the caches, too, before their next
# update.
_UPDATE_ELEMENTS = 16 << 20
# The elements that a daemon updates at a time, so that they stay in the processor's cache from one operation of the
# update to the next (PART_ELEMENTS in storage/steps/tile.py).
_PART_ELEMENTS = 1 << 18


class StoreUpdate:
    """An AdamW update as a daemon makes it: part by part, in memory like that of the daemon's arena.

    The gradient is converted to fp32 first, and the new weight is rounded to the type of the parameter at last, as by
    paramserver/optimizer_kernel.py.
    """

    def __init__(self, dtype: torch.dtype | None, elements: int) -> None:
        """Allocate the gradient, the parameter and the optimizer states that a call updates.

        Args:
            dtype: the dtype of gradients and parameters; None: fp32. With another dtype than fp32 there is also a
                master weight.
            elements: number of elements, a multiple of _PART_ELEMENTS.
        """
        self.elements = elements
        self.weight, self.first, self.second = (_floats(elements, torch.float32) for _ in range(3))
        self.second.abs_()
        self.gradient = _floats(elements, dtype or torch.float32)
        self.rounded = None if dtype in (None, torch.float32) else _floats(elements, dtype or torch.float32)
        self._scratch = torch.empty(_PART_ELEMENTS)
        self._row = HyperParameters(
            adamw=pb.AdamW(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, update_count=10)
        )

    @torch.no_grad()
    def __call__(self) -> None:
        """Update all elements once, on the threads that torch computes with."""
        for start in range(0, self.elements, _PART_ELEMENTS):
            part = slice(start, start + _PART_ELEMENTS)
            weight = self.weight[part]
            self._scratch.copy_(self.gradient[part])
            update_shards(
                [(start, weight.numel(), self._row)],
                weight,
                self._scratch,
                {pb.KIND_EXP_AVG: self.first[part], pb.KIND_EXP_AVG_SQ: self.second[part]},
                grad_scale=1.0,
                clip_value=None,
                start=start,
            )
            if self.rounded is not None:
                self.rounded[part].copy_(weight)


def update_rate(dtype: torch.dtype | None, threads: int, elements: int = _UPDATE_ELEMENTS) -> float:
    """Return the elements that `threads` threads together update in a second, in the way of a daemon's threads.

    Args:
        dtype: see StoreUpdate.
        threads: the number of threads.
        elements: the elements of all threads together.
    """
    each = -(-elements // (threads * _PART_ELEMENTS)) * _PART_ELEMENTS
    updates = [StoreUpdate(dtype, each) for _ in range(threads)]
    before = torch.get_num_threads()
    try:
        # torch's number of threads is set to 1 in each thread of the pool, because a thread that torch did not make has
        # a number of its own.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def update_all() -> None:
                list(pool.map(StoreUpdate.__call__, updates))

            update_all()
            return threads * each / statistics.median(_seconds(update_all) for _ in range(_TURNS))
    finally:
        torch.set_num_threads(before)


def _floats(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `elements` random numbers [elements] in memory like that of a daemon's arena."""
    found = torch.frombuffer(arena_like(elements * dtype.itemsize), dtype=dtype)
    return found.uniform_(-0.5, 0.5)


def arena_like(nbytes: int) -> memoryview:
    """Return private memory in huge pages, as a daemon's arena is, or in small pages if the kernel refuses.

    The memory is mapped until the last view of it is gone.
    """
    mapped = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    lead = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % _HUGE_PAGE_BYTES
    view = memoryview(mapped)[lead : lead + nbytes]
    # A byte of each page is written first, because the kernel can collapse only pages that are allocated.
    for offset in range(0, nbytes, mmap.PAGESIZE):
        view[offset] = 1
    whole = nbytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if whole:
        # An error of madvise is ignored: if the kernel refuses huge pages, the daemon's arena is in small pages, too.
        with contextlib.suppress(OSError):
            mapped.madvise(_MADV_COLLAPSE, lead, whole)
    return view


@contextlib.contextmanager
def _made_if_missing(directory: Path) -> Iterator[None]:
    """Make a directory and its missing parents; at the end, remove those that were made and are empty."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def probe_directory(directory: Path, file_bytes: int = _FILE_BYTES) -> tuple[float, float, float]:
    """Return the rates of reading, of writing, and of both at once (each way) in bytes per second.

    Two files of `file_bytes` are written, and removed. The requests are of 4 MiB and bypass the page cache where the
    file system supports that.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    try:
        with (
            _made_if_missing(directory),
            TemporaryDirectory(dir=directory, prefix="plan-probe-") as scratch,
            _File(Path(scratch) / "one", file_bytes) as one,
            _File(Path(scratch) / "two", file_bytes) as two,
            ThreadPoolExecutor(2) as pool,
        ):
            buffers = [arena_like(_BUFFER_BYTES) for _ in range(_READERS + _WRITERS)]
            to_read, to_write = buffers[:_READERS], buffers[_READERS:]
            for buffer in to_write:
                buffer[:] = os.urandom(_BUFFER_BYTES)

            def both() -> None:
                moves = [pool.submit(one.move, to_read, writes=False), pool.submit(two.move, to_write, writes=True)]
                for move in moves:
                    move.result()

            # The first write of a file also allocates the file's blocks, which happens only once in a store. So the
            # first write of each file is not timed.
            one.move(to_write, writes=True)
            two.move(to_write, writes=True)
            turns = [
                (
                    _seconds(lambda: one.move(to_read, writes=False)),
                    _seconds(lambda: two.move(to_write, writes=True)),
                    _seconds(both),
                )
                for _ in range(_TURNS)
            ]
    except OSError as error:
        raise ConfigError(
            f"--dir {directory} cannot be probed ({error.strerror}): choose another one, or give --nvme-read and "
            "--nvme-write"
        ) from None
    read, write, mixed = (file_bytes / statistics.median(taken) for taken in zip(*turns, strict=True))
    return read, write, mixed


class _File:
    """A file of the probe, which threads read or write as a whole, in requests of 4 MiB."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes

    def __enter__(self) -> _File:
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(self._path, flags, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def move(self, buffers: list[memoryview], *, writes: bool) -> None:
        """Read the file into the buffers or, if `writes`, write it from them, with one thread for each buffer."""

        def part(first: int) -> None:
            step = len(buffers) * _REQUEST_BYTES
            for turn, offset in enumerate(range(first * _REQUEST_BYTES, self._nbytes, step)):
                begin = turn * _REQUEST_BYTES % _BUFFER_BYTES
                request = buffers[first][begin : begin + _REQUEST_BYTES]
                (os.pwritev if writes else os.preadv)(self._fd, [request], offset)

        with ThreadPoolExecutor(len(buffers)) as pool:
            list(pool.map(part, range(len(buffers))))


def _seconds(move: Callable[[], object]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began
