"""The device "lag": a CPU that behaves like an accelerator whose streams lag.

`load()` makes it the accelerator of this process, for good: `torch.accelerator` and `torch.device("lag", 0)` are it. So
a process that loads it runs nothing else. The other functions set how the device behaves, and say what it has seen.

[Note: schedules of lag] A wait that is missing in a program shows only if something is late. No single schedule finds
all: SCHEDULES has those under which a test should run, and the results must have the same bits under each.

[Note: races] Whatever the lag, the device keeps a vector clock for each stream and for the host, and checks each access
of memory against those before it: two accesses of the same bytes that no event, stream or wait of the host orders are
reported by `races()`, if one of them writes. All threads of the host count as one, because the device cannot see how
they wait for each other. What the host itself does with memory is known from `host_access` only.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.utils import backend_registration

from tests.device import native_build

# A lag in milliseconds that ends only when something waits for the task.
ENDLESS = 3_600_000

_native: Any = None


def load() -> None:
    """Make "lag" the accelerator of this process; idempotent. Compiles the device if that has not been done yet.

    Raises:
        NoCompilerError: see `native_build.library`.
    """
    global _native  # noqa: PLW0603 - torch, too, has one such device in a process
    if _native is not None:
        return
    spec = importlib.util.spec_from_file_location("lag_native", native_build.library())
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    _native = native
    backend_registration.rename_privateuse1_backend("lag")
    torch._register_device_module("lag", _torch_module())
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    # Otherwise `module.to("lag")` would untie tied weights, because torch cannot change a tensor's device in place.
    torch.__future__.set_swap_module_params_on_conversion(True)
    dist.Backend.register_backend("lag", _make_group, devices=["lag"])
    # torch answers `is_pinned` only after the first use of pinned memory.
    torch.empty(1, pin_memory=True)
    # The interpreter must not take down what a late task still uses.
    atexit.register(synchronize)


def synchronize(device: object = None) -> None:
    """Wait for all streams of a device, or of all devices."""
    devices = range(_native.DEVICES) if device is None else [_index(device)]
    for index in devices:
        _native.synchronize(index)


def reset() -> None:
    """Wait for everything, and forget lags, limits, speeds, errors and races."""
    _native.reset()


# --- lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How late tasks begin.

    Attributes:
        all_ms: the lag of each stream.
        random_ms: to that, each task adds a random time below this one.
        seed: of the random times.
        compute_ms: the lag of the default streams, instead of `all_ms`; None: that.
    """

    all_ms: float = 0
    random_ms: float = 0
    seed: int = 0
    compute_ms: float | None = None

    def use(self) -> None:
        _native.set_lag_us(round(self.all_ms * 1000), None)
        _native.set_random_lag_us(round(self.random_ms * 1000), self.seed)
        if self.compute_ms is not None:
            for index in range(_native.DEVICES):
                default = torch.Stream(stream_id=0, device_index=index, device_type=_device_type())
                _native.set_lag_us(round(self.compute_ms * 1000), default)


SCHEDULES = {
    "nothing late": Schedule(),
    "all late": Schedule(all_ms=20),
    "copies late": Schedule(all_ms=20, compute_ms=0),
    "compute late": Schedule(compute_ms=100),
    "random": Schedule(random_ms=20, seed=1),
}
# `make mutants` sets this variable, to run each case under each schedule; otherwise each case runs under some of them.
IS_THOROUGH = bool(os.environ.get("PARAMSERVER_ALL_SCHEDULES"))


def set_lag(milliseconds: float, stream: torch.Stream | None = None) -> None:
    """Let the tasks of `stream`, or of all streams, begin so much after they were submitted."""
    _native.set_lag_us(round(milliseconds * 1000), stream)


def is_idle(stream: torch.Stream) -> bool:
    """Return whether a stream has no task left, without the order that `stream.query()` makes; see [Note: races]."""
    return bool(_native.is_idle(stream))


def most_outstanding() -> int:
    """Return how many tasks of one stream were outstanding at once, since the last reset."""
    return int(_native.most_outstanding())


# --- memory of the device


@dataclass(frozen=True, slots=True)
class MemoryCounters:
    """What a device's allocator has done; bytes, and calls since the start.

    Attributes:
        allocations: allocations by the program.
        segments: allocations for which no freed block fitted, as cudaMalloc would be called for them.
        allocated_bytes: now allocated.
        peak_bytes: most that were allocated.
        reserved_bytes: now in segments, free blocks included.
    """

    allocations: int
    segments: int
    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int


def memory_counters(device: object = 0) -> MemoryCounters:
    """Return the counters of a device."""
    return MemoryCounters(**_native.memory_counters(_index(device)))


def allocations_of(stream: torch.Stream) -> int:
    """Return how many blocks a stream has been given so far."""
    return int(_native.allocations_of(stream))


@contextmanager
def memory_limit(nbytes: int, device: object = 0) -> Iterator[None]:
    """Raise torch.OutOfMemoryError where the device's segments would exceed `nbytes`."""
    _, before = torch.accelerator.get_memory_info(_index(device))
    _native.set_memory_limit(_index(device), nbytes)
    try:
        yield
    finally:
        _native.set_memory_limit(_index(device), before)


# --- memory of the host


def register_host(address: int, nbytes: int) -> int:
    """Let copies use this memory while the host goes on; return 0, or the error of cuMemHostRegister."""
    return int(_native.register_host(address, nbytes))


def unregister_host(address: int) -> int:
    """Undo `register_host`; return 0, or the error of cuMemHostUnregister."""
    return int(_native.unregister_host(address))


def registered_bytes() -> int:
    """Return how much memory of the host is registered, that of `pin_memory` included."""
    return int(_native.registered_bytes())


def fail_registrations(calls: int) -> None:
    """Let the next calls of `register_host` fail with CUDA_ERROR_OUT_OF_MEMORY."""
    _native.fail_registrations(calls)


def host_allocations() -> int:
    """Return how often registered memory has been allocated (`pin_memory`) so far."""
    return int(_native.host_allocations())


# --- races


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses of the same bytes that nothing orders, the later call second. `count` such pairs were seen."""

    first: str
    first_writes: bool
    first_lane: str
    second: str
    second_writes: bool
    second_lane: str
    address: int
    count: int

    def __str__(self) -> str:
        first = f"{self.first} ({'writes' if self.first_writes else 'reads'}, {self.first_lane})"
        second = f"{self.second} ({'writes' if self.second_writes else 'reads'}, {self.second_lane})"
        return f"nothing orders {second} after {first}: {self.count} times, at {self.address:#x}"


def races() -> list[Race]:
    """Return the races since the last `clear_races` or `reset`; see [Note: races]."""
    return [Race(**fields) for fields in _native.races()]


def clear_races() -> None:
    """Forget the races so far."""
    _native.clear_races()


def host_access(tensor: torch.Tensor, name: str, *, writes: bool) -> None:
    """Declare that the host reads or writes registered memory now, so that late copies of it are found."""
    _native.host_accesses(tensor.data_ptr(), tensor.nbytes, name, writes)


# --- virtual time


class Engine(IntEnum):
    """What does a task; each engine of a device does one task at a time."""

    COMPUTE = 0
    TO_DEVICE = 1
    TO_HOST = 2
    COLLECTIVE = 3


@dataclass(frozen=True, slots=True)
class Span:
    """When a task would have run, in seconds of virtual time."""

    name: str
    device: int
    stream: int
    engine: Engine
    begin: float
    end: float
    nbytes: float


def set_speed(
    engine: Engine, *, latency_seconds: float = 0.0, bytes_per_second: float = 0.0, flops_per_second: float = 0.0
) -> None:
    """Let each task of an engine take its latency, and its bytes and flops divided by the speeds; 0: no time."""
    _native.set_speed(int(engine), latency_seconds, bytes_per_second, flops_per_second)


def set_kernel_seconds(name: str, seconds: float) -> None:
    """Let each kernel of this name, such as "aten::mm", take `seconds`, whatever the speeds are."""
    _native.set_kernel_seconds(name, seconds)


def set_host_seconds(of_a_task: float) -> None:
    """Let the host need so long for each task that it submits; 0, the default: the host takes no time."""
    _native.set_host_seconds_of_a_task(of_a_task)


def host_works(seconds: float) -> float:
    """Let the host work for `seconds` of virtual time; return its time then."""
    return float(_native.host_works(seconds))


@contextmanager
def recorded() -> Iterator[list[Span]]:
    """Collect the spans of the tasks that are submitted meanwhile; the list is filled at the end."""
    spans: list[Span] = []
    _native.record_spans(True)
    try:
        yield spans
    finally:
        rows = _native.spans()
        spans += [Span(name, device, stream, Engine(engine), *rest) for name, device, stream, engine, *rest in rows]
        _native.record_spans(False)


def hidden_share(spans: list[Span], engines: frozenset[Engine] | set[Engine], device: int = 0) -> float:
    """Return which part of the time of `engines` lies under the device's compute; 1 if they took no time."""
    ours = [span for span in spans if span.device == device]
    moving = _union((span.begin, span.end) for span in ours if span.engine in engines)
    computing = _union((span.begin, span.end) for span in ours if span.engine == Engine.COMPUTE)
    total = sum(end - begin for begin, end in moving)
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moving for b in computing)
    return hidden / total if total else 1.0


def _union(intervals: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


# --- what torch asks for


def _index(device: object) -> int:
    if isinstance(device, int):
        return device
    given = torch.device(device) if isinstance(device, str) else device
    index = None if given is None else given.index  # type: ignore[attr-defined]
    return int(_native.current_device() if index is None else index)


def _device_type() -> int:
    return int(torch.Stream(device="lag:0").device_type)


def _make_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    # gloo has the bytes of the device's tensors; see native/collectives.h.
    gloo = ProcessGroupGloo(PrefixStore("lag", store), rank, size, timeout)
    return _native.make_group(gloo, rank, size)


class _DeviceContext:
    """`torch.lag.device(1)`: the current device, for a while."""

    def __init__(self, device: object) -> None:
        self._index = _index(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = _native.current_device()
        _native.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _native.set_device(self._before)


def _torch_module() -> types.ModuleType:
    """Return what torch knows as `torch.lag`."""
    module: Any = types.ModuleType("torch.lag")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: _native.DEVICES
    module.current_device = _native.current_device
    module.set_device = lambda device: _native.set_device(_index(device))
    module.device = _DeviceContext
    module.synchronize = synchronize
    module.current_stream = lambda device=None: torch.accelerator.current_stream(torch.device("lag", _index(device)))
    module.Stream = lambda device=None, **_: torch.Stream(device=torch.device("lag", _index(device)))
    module.Event = lambda **options: torch.Event(device="lag", **options)
    module.manual_seed = lambda seed: _native.default_generator(_index(None)).manual_seed(seed)
    module.manual_seed_all = _seed_all
    module.get_rng_state = lambda device="lag": _native.default_generator(_index(device)).get_state()
    module.set_rng_state = _set_rng_state
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.mem_get_info = lambda device=None: torch.accelerator.get_memory_info(_index(device))
    sys.modules["torch.lag"] = module
    return cast(types.ModuleType, module)


def _seed_all(seed: int) -> None:
    for index in range(_native.DEVICES):
        _native.default_generator(index).manual_seed(seed)


def _set_rng_state(state: torch.Tensor, device: object = "lag") -> None:
    _native.default_generator(_index(device)).set_state(state)
