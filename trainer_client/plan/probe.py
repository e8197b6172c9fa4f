"""The probe: how fast this machine computes a step, moves bytes, and updates, reads and writes what a store holds.

This module owns the processes that it starts, and ends them. Every rate is one of all ranks working at
once, because they share memory and processors. This module must never run while a job trains on this machine, because
both would be slower.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from trainer_client.device import CPU, backend_of
from trainer_client.errors import ConfigError
from trainer_client.plan.machine import Rates
from trainer_client.plan.real_pass import RealPass, pass_seconds
from trainer_client.plan.rehearsal import Operation, TensorSpec
from trainer_client.plan.store_probe import StoreUpdate, probe_directory, update_limit

_COPY_BYTES = 64 << 20
# The elements of the device's update that is timed: fp32 arrays of 64 MiB, larger than the processor's caches.
_UPDATE_ELEMENTS = 16 << 20
# The probe repeats a measurement for about _LEAST_SECONDS, but at least _LEAST_REPEATS and at most _MOST_REPEATS times,
# and takes the mean.
_LEAST_SECONDS = 0.05
_LEAST_REPEATS = 2
_MOST_REPEATS = 200
# The collectives of _COPY_BYTES whose median is taken.
_COLLECTIVES = 3
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
        real_pass: the forward and backward that is timed in place of the operations; None: they are timed.
        dtype: the dtype of gradients and parameters if it is not fp32.
        threads: number of threads that compute.
        ranks: number of processes that measure at the same time.
        rank: number of this process.
        port: port at which they meet.
        device: "cpu" or "cuda".
    """

    operations: Sequence[tuple[Operation, int]]
    real_pass: RealPass | None = None
    dtype: torch.dtype | None = None
    threads: int
    ranks: int
    rank: int
    port: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a process.

    Attributes:
        compute_seconds: the seconds of a forward and backward, real or summed up from operations.
        copy, fresh_copy, link: bytes per second; see `copy`, `fresh_copy` and `device_link` of Rates.
        update, device_update: elements per second; see Rates.
        collective: bytes of a whole buffer that a rank gathers in a second; None: there is one rank.
    """

    compute_seconds: float
    copy: float
    fresh_copy: float
    link: float
    update: float
    device_update: float
    collective: float | None


def probe(
    operations: Mapping[Operation, int],
    *,
    real_pass: RealPass | None = None,
    dtype: torch.dtype | None = None,
    ranks: int,
    threads: int,
    directory: Path | None,
    device: str,
    optimizer_threads: int = 1,
) -> tuple[Rates, float]:
    """Return the rates of this machine, and the seconds of forward and backward on each rank.

    Args:
        operations: the operations of one micro-batch; empty: only the rates are measured.
        real_pass: the forward and backward that is timed in place of the operations; None: they are timed.
        dtype: the dtype of gradients and parameters if it is not fp32.
        ranks: number of ranks of this node.
        threads: threads of each rank.
        directory: a directory on the device that is to hold the state; None: the rates of NVMe are known, and 1 stands
            in their place.
        device: "cpu" or "cuda".
        optimizer_threads: the daemon's key of this name.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    port = free_port() if ranks > 1 else 0
    tasks = [
        Task(
            operations=list(operations.items()),
            real_pass=real_pass,
            dtype=dtype,
            threads=threads,
            ranks=ranks,
            rank=rank,
            port=port,
            device=device,
        )
        for rank in range(ranks)
    ]
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:
        measured = pool.map(measure, tasks, chunksize=1)
    slowest = max(measured, key=lambda one: one.compute_seconds)
    read, write, both = (1.0, 1.0, 1.0) if directory is None else probe_directory(directory)
    update = min(one.update for one in measured)
    copy = min(one.copy for one in measured)
    collectives = [one.collective for one in measured if one.collective is not None]
    return (
        Rates(
            copy=copy,
            fresh_copy=min(one.fresh_copy for one in measured),
            device_link=min(one.link for one in measured),
            nvme_read=read,
            nvme_write=write,
            nvme_both=both,
            update=update,
            update_limit=update_limit(dtype, optimizer_threads, update),
            device_update=min(one.device_update for one in measured),
            collective=min(collectives) if collectives else None,
        ),
        slowest.compute_seconds,
    )


def measure(task: Task) -> Measured:
    """Measure in this process, at the same time as the other ranks do."""
    torch.set_num_threads(task.threads)
    collective = _collective_rate(task) if task.ranks > 1 else None
    if task.real_pass is not None:
        compute = _pass_seconds(task.real_pass)
    else:
        compute = sum(count * seconds_of(operation, task.device) for operation, count in task.operations)
    on_device = device_update_rate()
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    torch.set_num_threads(1)
    copied = _COPY_BYTES / _mean(lambda: target.copy_(source))
    # malloc takes blocks of this size from the kernel, and gives them back, each time.
    fresh = _COPY_BYTES / _mean(lambda: torch.empty_like(source).copy_(source))
    link = copied
    if task.device != CPU:
        pinned, there = source.pin_memory(), torch.empty_like(source, device=task.device)

        def send() -> None:
            there.copy_(pinned)
            torch.accelerator.synchronize()

        link = _COPY_BYTES / _mean(send)
    update = StoreUpdate(task.dtype)
    updated = update.elements / _mean(update)
    return Measured(
        compute_seconds=compute,
        copy=copied,
        fresh_copy=fresh,
        link=link,
        update=updated,
        device_update=on_device,
        collective=collective,
    )


def _pass_seconds(real_pass: RealPass) -> float:
    """Return the seconds of a real pass. It raises ConfigError if the model cannot be run."""
    try:
        return pass_seconds(real_pass)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model's forward and backward cannot be run ({type(error).__name__}: {error}): give fewer --tokens "
            f"than {real_pass.tokens}, other arguments of forward by --inputs, or the rates and --no-probe"
        ) from error


def device_update_rate(elements: int = _UPDATE_ELEMENTS) -> float:
    """Return the elements that a rank on the CPU updates in a second, in its own memory and on all its threads."""
    weight, gradient, first, second = (torch.rand(elements) for _ in range(4))
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

    return elements / _mean(update)


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
        for _ in range(1 + _COLLECTIVES):
            began = time.perf_counter()
            gather(whole, part)
            taken.append(time.perf_counter() - began)
        # The first one is left out, as in `_mean`.
        return whole.nbytes / statistics.median(taken[1:])
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
