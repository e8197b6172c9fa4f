"""The probe, which measures how fast this machine computes a step, moves bytes, and does a store's work.

This module owns the processes that it starts, and ends them. Every rate is measured while all ranks of the node work at
once, because they share memory and processors. The probe must never run while a job trains on this machine, because
both would be slower.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from trainer_client.base.device import CPU, backend_of
from trainer_client.plan.machine import Rates
from trainer_client.plan.rehearsal import RehearsedCall, RehearsedTensor
from trainer_client.plan.store_probe import probe_directory, update_rate

_COPY_BYTES = 64 << 20
# The probe repeats a measurement for about _LEAST_SECONDS, but at least _LEAST_REPEATS and at most _MOST_REPEATS times,
# and takes the mean.
_LEAST_SECONDS = 0.05
_LEAST_REPEATS = 2
_MOST_REPEATS = 200
# The number of timed collectives of _COPY_BYTES each. The rate follows from the median of their times.
_COLLECTIVES = 3


def probe(
    operations: Mapping[RehearsedCall, int],
    *,
    dtype: torch.dtype | None = None,
    ranks: int,
    threads: int,
    directory: Path | None,
    device: str,
    optimizer_threads: int = 1,
) -> tuple[Rates, float]:
    """Return the rates of this machine, and the seconds of forward and backward on each rank.

    Args:
        operations: the operations of one micro-batch, and how often the micro-batch calls each; empty: only the rates
            are measured.
        dtype: the dtype of gradients and parameters if it is not fp32.
        ranks: number of ranks of this node.
        threads: threads of each rank.
        directory: a directory on the NVMe device that is to hold the state; None: the rates of NVMe are not measured,
            and 1 stands in their place.
        device: "cpu" or "cuda".
        optimizer_threads: the value of the daemon's key of this name.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    task = functools.partial(
        measure,
        operations=list(operations.items()),
        dtype=dtype,
        ranks=ranks,
        threads=threads,
        device=device,
        port=free_port() if ranks > 1 else 0,
    )
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:
        measured = pool.map(task, range(ranks), chunksize=1)
    slowest = {name: min(rates[name] for rates, _ in measured) for name in measured[0][0]}
    read, write, both = (1.0, 1.0, 1.0) if directory is None else probe_directory(directory)
    rates = Rates(
        copy=slowest["copy"],
        device_link=slowest["device_link"],
        nvme_read=read,
        nvme_write=write,
        nvme_both=both,
        update=update_rate(dtype, optimizer_threads),
        device_update=slowest.get("device_update"),
        collective=slowest.get("collective"),
    )
    return rates, max(seconds for _, seconds in measured)


def measure(
    rank: int,
    *,
    operations: Sequence[tuple[RehearsedCall, int]],
    dtype: torch.dtype | None,
    ranks: int,
    threads: int,
    device: str,
    port: int,
) -> tuple[dict[str, float], float]:
    """Measure as one rank, at the same time as the processes of the other ranks. For the arguments see `probe`.

    Args:
        rank: the number of this process among the ranks.
        port: the port at which the ranks meet.

    Returns:
        The rates, by the names of the fields of Rates, and the sum of the seconds of all operations.
    """
    torch.set_num_threads(threads)
    rates = dict[str, float]()
    if ranks > 1:
        rates["collective"] = _collective_rate(rank, ranks, device, port)
    seconds = sum(count * seconds_of(operation, device) for operation, count in operations)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    torch.set_num_threads(1)
    rates["copy"] = rates["device_link"] = _COPY_BYTES / _mean(lambda: target.copy_(source))
    if device == CPU:
        rates["device_update"] = update_rate(dtype, threads)
    else:
        pinned, there = source.pin_memory(), torch.empty_like(source, device=device)

        def send() -> None:
            there.copy_(pinned)
            torch.accelerator.synchronize()

        rates["device_link"] = _COPY_BYTES / _mean(send)
    return rates, seconds


def seconds_of(operation: RehearsedCall, device: str) -> float:
    """Return the mean seconds of a call of an operation, with operands of the rehearsed shapes that it accepts."""
    namespace, name, overload = operation.name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)

    def make(value: Any) -> Any:
        return _tensor(value, device) if isinstance(value, RehearsedTensor) else value

    def is_spec(value: Any) -> bool:
        return isinstance(value, RehearsedTensor)

    args, kwargs = tree_map(make, operation.arguments, is_leaf=is_spec)
    synchronize = _nothing if device == CPU else torch.accelerator.synchronize

    def call() -> None:
        function(*args, **kwargs)
        synchronize()

    with torch.no_grad():
        return _mean(call)


def _tensor(spec: RehearsedTensor, device: str) -> torch.Tensor:
    elements = 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    if not all(spec.shape):
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    storage = torch.zeros(elements, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point:
        # The values of a tensor for a measurement are small and differ from one another, because the speed of some
        # operations depends on the values.
        storage.uniform_(-0.5, 0.5)
    return storage.as_strided(spec.shape, spec.stride)


def _mean(call: Callable[[], object]) -> float:
    """Return the mean seconds of several calls. The first call is not counted, because it may be slower.

    The mean, and not the median, is returned, because it includes delays by other processes, as a step's time does.
    """
    began = time.perf_counter()
    call()
    first = time.perf_counter() - began
    wanted = min(_MOST_REPEATS, max(_LEAST_REPEATS, math.ceil(_LEAST_SECONDS / max(first, 1e-6))))
    began = time.perf_counter()
    for _ in range(wanted):
        call()
    return (time.perf_counter() - began) / wanted


def _collective_rate(rank: int, ranks: int, device: str, port: int) -> float:
    """Return the bytes of a whole buffer that each rank gathers from all ranks in a second."""
    dist = torch.distributed
    if device != CPU:
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend_of(device), init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        part = torch.zeros(_COPY_BYTES // 4 // ranks, device=device)
        whole = torch.zeros(part.numel() * ranks, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        taken = []
        for _ in range(1 + _COLLECTIVES):
            began = time.perf_counter()
            gather(whole, part)
            taken.append(time.perf_counter() - began)
        # The time of the first collective is not in the median, because the first one may be slower, as in `_mean`.
        return whole.nbytes / statistics.median(taken[1:])
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """Return a port of the loopback interface that no process uses at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _nothing() -> None:
    return None
