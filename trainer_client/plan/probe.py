"""The probe: how fast this machine computes the operations of a step, moves bytes, and reads and writes a directory.

This module owns the files and processes that it makes, and removes them. Every rate is one of all ranks working at
once, because they share memory and processors. This module must never run while a job trains on this machine, because
both would be slower.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trainer_client.device import CPU, backend_of
from trainer_client.errors import ConfigError
from trainer_client.plan.machine import Rates
from trainer_client.plan.rehearsal import Operation, TensorSpec

_REQUEST_BYTES = 4 << 20
_FILE_BYTES = 512 << 20
# The numbers of reading and of writing threads of a daemon.
_READERS, _WRITERS = 4, 2
_COPY_BYTES = 64 << 20
# The elements of the update that is timed: four fp32 arrays of 64 MiB. They are larger than the processor's caches,
# because in training, too, the states are not in the caches any more when their next update comes.
_UPDATE_ELEMENTS = 16 << 20
# The probe repeats a measurement for about _LEAST_SECONDS, but at least _LEAST_REPEATS and at most _MOST_REPEATS times,
# and takes the mean.
_LEAST_SECONDS = 0.05
_LEAST_REPEATS = 2
_MOST_REPEATS = 200
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
# The bytes of operands after which a product's first operands are no longer in a cache. This is more than the caches of
# a processor or a GPU.
_CACHE_BYTES = 96 << 20
_MOST_SETS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The measurements that one process of the probe makes.

    Attributes:
        operations: the operations of a step, and how often a step calls each.
        threads: number of threads that compute.
        ranks: number of processes that measure at the same time.
        rank: number of this process.
        port: port at which they meet.
        device: "cpu" or "cuda".
    """

    operations: Sequence[tuple[Operation, int]]
    threads: int
    ranks: int
    rank: int
    port: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a process: the seconds of all operations, and rates in bytes or elements per second."""

    compute_seconds: float
    copy: float
    link: float
    update: float
    collective: float | None


def probe(
    operations: Mapping[Operation, int], *, ranks: int, threads: int, directory: Path, device: str
) -> tuple[Rates, float]:
    """Return the rates of this machine, and the seconds that the operations of a step take on each rank.

    Args:
        operations: the operations of one micro-batch; empty: only the rates are measured.
        ranks: number of ranks of this node.
        threads: threads of each rank.
        directory: a directory on the device that is to hold the state.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: the directory cannot be written to.
    """
    port = free_port() if ranks > 1 else 0
    tasks = [
        Task(operations=list(operations.items()), threads=threads, ranks=ranks, rank=r, port=port, device=device)
        for r in range(ranks)
    ]
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:
        measured = pool.map(measure, tasks, chunksize=1)
    slowest = max(measured, key=lambda one: one.compute_seconds)
    read, write, both = probe_directory(directory)
    copy = min(one.copy for one in measured)
    collectives = [one.collective for one in measured if one.collective is not None]
    return (
        Rates(
            copy=copy,
            device_link=min(one.link for one in measured),
            nvme_read=read,
            nvme_write=write,
            nvme_both=both,
            update=min(one.update for one in measured),
            collective=min(collectives) if collectives else None,
        ),
        slowest.compute_seconds,
    )


def measure(task: Task) -> Measured:
    """Measure in this process, at the same time as the other ranks do."""
    torch.set_num_threads(task.threads)
    collective = _collective_rate(task) if task.ranks > 1 else None
    compute = sum(count * seconds_of(operation, task.device) for operation, count in task.operations)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    torch.set_num_threads(1)
    copied = _COPY_BYTES / _mean(lambda: target.copy_(source))
    link = copied
    if task.device != CPU:
        pinned, on_device = source.pin_memory(), torch.empty_like(source, device=task.device)

        def send() -> None:
            on_device.copy_(pinned)
            torch.accelerator.synchronize()

        link = _COPY_BYTES / _mean(send)
    weight, gradient, first, second = (torch.zeros(_UPDATE_ELEMENTS) for _ in range(4))
    counter = torch.ones(())

    def update() -> None:
        torch._fused_adamw_(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [counter],
            amsgrad=False,
            maximize=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.0,
            eps=1e-8,
        )

    updated = _UPDATE_ELEMENTS / _mean(update)
    return Measured(compute_seconds=compute, copy=copied, link=link, update=updated, collective=collective)


def probe_directory(directory: Path, file_bytes: int = _FILE_BYTES) -> tuple[float, float, float]:
    """Return the rates of reading, of writing, and of both at once (each way) in bytes per second.

    Two files of `file_bytes` are written, and removed. The requests are of 4 MiB and bypass the page cache where the
    file system supports that.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (
            TemporaryDirectory(dir=directory, prefix="plan-probe-") as scratch,
            _File(Path(scratch) / "one", file_bytes) as one,
            _File(Path(scratch) / "two", file_bytes) as two,
            ThreadPoolExecutor(2) as pool,
        ):

            def both() -> None:
                moves = [pool.submit(one.move, _READERS, writes=False), pool.submit(two.move, _WRITERS, writes=True)]
                for move in moves:
                    move.result()

            # The first write of a file also allocates its blocks, which a store does once. So the second write is
            # timed.
            one.move(_WRITERS, writes=True)
            two.move(_WRITERS, writes=True)
            write = file_bytes / _seconds(lambda: two.move(_WRITERS, writes=True))
            read = file_bytes / _seconds(lambda: one.move(_READERS, writes=False))
            mixed = file_bytes / _seconds(both)
    except OSError as error:
        raise ConfigError(
            f"--dir {directory} cannot be probed ({error.strerror}): choose another one, or give --nvme-read and "
            "--nvme-write"
        ) from error
    return read, write, mixed


class _File:
    """A file that threads read or write whole, in requests of 4 MiB."""

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

    def move(self, threads: int, *, writes: bool) -> None:
        """Move all bytes of the file."""

        def part(first: int) -> None:
            with mmap.mmap(-1, _REQUEST_BYTES) as buffer:
                buffer[:] = os.urandom(1 << 16) * (_REQUEST_BYTES >> 16)
                for offset in range(first * _REQUEST_BYTES, self._nbytes, threads * _REQUEST_BYTES):
                    (os.pwritev if writes else os.preadv)(self._fd, [buffer], offset)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))


def _seconds(move: Callable[[], None]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began


def seconds_of(operation: Operation, device: str) -> float:
    """Return the seconds of one call of an operation on operands with valid values."""
    namespace, name, overload = operation.name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)

    def make(value: Any) -> Any:
        return _tensor(value, device) if isinstance(value, TensorSpec) else value

    def is_spec(value: Any) -> bool:
        return isinstance(value, TensorSpec)

    sets = operand_sets(operation)
    operands = itertools.cycle([tree_map(make, operation.arguments, is_leaf=is_spec) for _ in range(sets)])
    synchronize = _nothing if device == CPU else torch.accelerator.synchronize

    def call() -> None:
        args, kwargs = next(operands)
        function(*args, **kwargs)
        synchronize()

    with torch.no_grad():
        return _mean(call)


def operand_sets(operation: Operation) -> int:
    """Return the number of sets of operands that the timed calls of an operation use in turn.

    The weights and activations of a product were last used in another unit, so in a step they come from memory. With
    one set they would come from the cache. All other operations work on results that were made just before.
    """
    if operation.name.rpartition(".")[0] not in _PRODUCTS:
        return 1
    leaves = tree_leaves(operation.arguments, is_leaf=lambda value: isinstance(value, TensorSpec))
    nbytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in leaves if isinstance(one, TensorSpec))
    return max(1, min(_MOST_SETS, math.ceil(_CACHE_BYTES / max(1, nbytes))))


def _tensor(spec: TensorSpec, device: str) -> torch.Tensor:
    elements = 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    if not all(spec.shape):
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    storage = torch.zeros(elements, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point:
        # The values are small, because the speed of some functions depends on the size of their arguments.
        storage.uniform_(-0.5, 0.5)
    return storage.as_strided(spec.shape, spec.stride)


def _mean(call: Callable[[], object]) -> float:
    """Return the mean seconds of a call, without the first call.

    The mean includes delays by other processes, as a step's time does.
    """
    began = time.perf_counter()
    call()
    first = time.perf_counter() - began
    wanted = min(_MOST_REPEATS, max(_LEAST_REPEATS, math.ceil(_LEAST_SECONDS / max(first, 1e-6))))
    began = time.perf_counter()
    for _ in range(wanted):
        call()
    return (time.perf_counter() - began) / wanted


def _collective_rate(task: Task) -> float:
    """Return the bytes of a whole buffer that all ranks gather in a second."""
    dist = torch.distributed
    if task.device != CPU:
        torch.accelerator.set_device_index(task.rank)
    address = f"tcp://127.0.0.1:{task.port}"
    dist.init_process_group(backend_of(task.device), init_method=address, rank=task.rank, world_size=task.ranks)
    try:
        part = torch.zeros(_COPY_BYTES // 4 // task.ranks, device=task.device)
        whole = torch.zeros(part.numel() * task.ranks, device=task.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        taken = []
        for _ in range(4):
            began = time.perf_counter()
            gather(whole, part)
            taken.append(time.perf_counter() - began)
        return whole.nbytes / sorted(taken[1:])[1]
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """Return a port of loopback that no process uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _nothing() -> None:
    return None
