"""DeepSpeed's `get_accelerator()`: the device that the training runs on, under one set of names for GPUs and CPUs.

This module owns the choice of names. The device is the one that `initialize` has chosen, by `paramserver.device`, or
would choose without that key: this rank's GPU or other accelerator if torch finds one, else the CPU. This module must
never keep a state of its own, because torch keeps all state.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer_client.base.device import CPU, backend_of, kind_in_use, visible_devices_variable
from trainer_client.base.own_memory import peak_resident_bytes, resident_bytes
from trainer_client.errors import ConfigError

__all__ = ["DeviceAccelerator", "get_accelerator", "set_accelerator"]

_CUDA = "cuda"

# The methods of DeepSpeed's accelerators that DeviceAccelerator lacks, with the text of the error that says what to use
# instead.
_LEFT_OUT = {
    "amp": "use torch.amp",
    "build_extension": "this library compiles nothing on the user's machine",
    "capture_to_graph": "use torch.cuda.graph",
    "create_graph": "use torch.cuda.CUDAGraph",
    "create_op_builder": "this library compiles nothing on the user's machine",
    "get_op_builder": "this library compiles nothing on the user's machine",
    "op_builder_dir": "this library compiles nothing on the user's machine",
    "prefer_triton_grouped_mm": "this library has no grouped matrix products of Triton; use torch._grouped_mm",
    "replay_graph": "use torch.cuda.CUDAGraph.replay()",
    "set_compile_backend": "use torch.compile(backend=...)",
}


class DeviceAccelerator:
    """The device that the training runs on, with the methods of DeepSpeed's accelerators.

    A CPU has one stream, whose context does nothing, and no events.

    Attributes:
        Stream: the class of the device's streams.
        Event: the class of the device's events; None on CPUs.

    Args:
        device_type: the kind of the device as torch names it: "cpu", "cuda", "xpu" and so on.
    """

    def __init__(self, device_type: str) -> None:
        self._name = device_type
        self._is_host = device_type == CPU
        # torch's module for this kind of device, such as torch.cuda. These modules have the same functions for each
        # kind of accelerator.
        self._module: Any = torch.get_device_module(device_type)
        self.Stream: Any = self._module.Stream
        self.Event: Any = None if self._is_host else self._module.Event

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        remedy = _LEFT_OUT.get(name, f"use torch.{self._name}, torch.accelerator or torch.amp")
        raise AttributeError(f"get_accelerator() has no {name!r} here: {remedy}")

    # Methods about devices

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device as torch writes it: "cpu", "cuda", or "cuda:1" for an index."""
        return self._name if device_index is None or self._is_host else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device as a torch.device. Within `with` of the result, it is torch's current device."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int | str | torch.device) -> None:
        """Make the GPU `device_index` torch's current device. On CPUs, the call has no effect."""
        if not self._is_host:
            self._module.set_device(device_index)

    def current_device(self) -> int:
        """Return the index of torch's current device."""
        return 0 if self._is_host else self._module.current_device()

    def current_device_name(self) -> str:
        """Return the current device as torch writes it: "cpu" or "cuda:1"."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of GPUs; on a machine without GPUs, 1."""
        return 1 if self._is_host else self._module.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has done all the work that this process has given it. On CPUs, do nothing."""
        if not self._is_host:
            self._module.synchronize(device_index)

    def is_available(self) -> bool:
        """Return True, because the device was chosen among those that there are."""
        return True

    def is_synchronized_device(self) -> bool:
        """Return whether an operation of torch on the device has ended when its call returns."""
        return self._is_host

    def use_host_timers(self) -> bool:
        """Return whether the host's clock around a call measures how long the operation takes."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Return whether the device itself waits for data that another stream computes, so that scripts need not."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Return whether the device itself waits until there is free memory, so that scripts need not."""
        return self.is_synchronized_device()

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for tensors on the device."""
        return backend_of(self._name)

    def visible_devices_envs(self) -> list[str]:
        """Return the names of the environment variables that limit which devices a process sees."""
        name = visible_devices_variable(self._name)
        return [] if name is None else [name]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Iterable[int]
    ) -> None:
        """Change the environment `current_env` so that processes started with it see only the given devices.

        `local_accelerator_ids` are the numbers of the devices on this node.
        """
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Return the prefixes of the names of environment variables that DeepSpeed's launcher sends to other nodes."""
        return ["NCCL"] if self._name == _CUDA else []

    def communication_backend_version(self) -> Any:
        """Return the version of NCCL as a tuple. On other devices the call raises AttributeError."""
        if self._name != _CUDA:
            raise AttributeError(
                f"get_accelerator() has no 'communication_backend_version' on {self._name}: "
                f"{self.communication_backend_name()} has no version of its own; use torch.__version__"
            )
        return torch.cuda.nccl.version()

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call `callback`: now on CPUs, and on an accelerator as soon as torch has initialized it."""
        if self._is_host or not hasattr(self._module, "_lazy_call"):
            callback()
        else:
            self._module._lazy_call(callback)

    def is_triton_supported(self) -> bool:
        """Return whether kernels of Triton run on the device, as DeepSpeed says it: on GPUs since Ampere."""
        return self._name == _CUDA and torch.cuda.get_device_capability()[0] >= 8

    def get_compile_backend(self) -> str:
        """Return the name of the backend that torch.compile uses if a script names none."""
        return "inductor"

    # Methods about dtypes

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bfloat16."""
        # torch's module for a kind of device may lack the function `is_bf16_supported`, as the module for CPUs does.
        # Then the device counts as able to compute in bfloat16.
        ask = getattr(self._module, "is_bf16_supported", None)
        return True if ask is None else bool(ask())

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in float16."""
        return self._name != _CUDA or torch.cuda.get_device_capability()[0] >= 7

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point dtypes that the device can compute in."""
        halves = {torch.half: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float, *(dtype for dtype, is_supported in halves.items() if is_supported)]

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        return self._maker(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        return self._maker(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        return self._maker(torch.double)

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        return self._maker(torch.float)

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        return self._maker(torch.half)

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        return self._maker(torch.int)

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:  # noqa: N802
        return self._maker(torch.long)

    def _maker(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        """Return a function that makes a tensor of `dtype` on the device, as torch.FloatTensor does on the CPU."""
        return functools.partial(torch.tensor, dtype=dtype, device=self.current_device_name())

    # Methods about random numbers

    def random(self) -> Any:
        """Return the module torch.random, which DeepSpeed's accelerators return here, too."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        if not self._is_host:
            self._module.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        if not self._is_host:
            self._module.manual_seed_all(seed)
        else:
            torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed of the current device's generator."""
        return torch.initial_seed() if self._is_host else self._module.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the generator of a device."""
        return torch.default_generator if self._is_host else self._module.default_generators[device_index]

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of a device's generator, of the current device if the index is None."""
        if self._is_host:
            return torch.get_rng_state()
        device = self._module.current_device() if device_index is None else device_index
        state: torch.Tensor = self._module.get_rng_state(device)
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of a device's generator, of the current device if the index is None."""
        if not self._is_host:
            device = self._module.current_device() if device_index is None else device_index
            self._module.set_rng_state(new_state, device)
        else:
            torch.set_rng_state(new_state)

    # Methods about streams and events

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the current stream. For None, as on CPUs, it does nothing."""
        return self._module.stream(stream) if not self._is_host and stream is not None else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the current stream of a device."""
        return torch.cpu.current_stream() if self._is_host else self._module.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the default stream of a device."""
        return torch.cpu.current_stream() if self._is_host else self._module.default_stream(device_index)

    def range_push(self, message: str) -> None:
        """Begin a range of NVTX, which a profiler shows. Without effect on all devices but CUDA's."""
        if self._name == _CUDA:
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        """End the range of NVTX that was begun last. Without effect on all devices but CUDA's."""
        if self._name == _CUDA:
            torch.cuda.nvtx.range_pop()

    # Methods about memory, in bytes. For a CPU they return the memory of this process.

    def empty_cache(self) -> None:
        """Give memory that torch has cached back to the device. Without effect on CPUs."""
        if not self._is_host:
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes that tensors take on the device. On CPUs, return the process's resident memory."""
        return resident_bytes() if self._is_host else self._module.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest value that `memory_allocated` has had; on CPUs, since the process began."""
        return peak_resident_bytes() if self._is_host else self._module.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that torch has taken from the device. On CPUs, return what `memory_allocated` returns."""
        return resident_bytes() if self._is_host else self._module.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the largest value that `memory_reserved` has had; on CPUs, since the process began."""
        return peak_resident_bytes() if self._is_host else self._module.max_memory_reserved(device_index)

    def get_rss(self) -> int:
        """Return the bytes of this process that are in RAM now, its resident set."""
        return resident_bytes()

    def reset_rss(self) -> int:
        """Return what `get_rss` returns. The call resets nothing, because the kernel's peak cannot be reset."""
        return resident_bytes()

    # DeepSpeed's accelerators also have the old names that torch's functions had, so they are here as well.
    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return torch's statistics of the device's memory, by name. On CPUs, return an empty dict."""
        return {} if self._is_host else self._module.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peaks that `max_memory_allocated` and `max_memory_reserved` return.

        On CPUs the call has no effect, because the kernel's peak of a process cannot be reset.
        """
        if not self._is_host:
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats
    reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory that the device has; on CPUs, those that the machine has."""
        return _pages("SC_PHYS_PAGES") if self._is_host else self._module.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory that are free on the device; on CPUs, those that are free on the machine."""
        return _pages("SC_AVPHYS_PAGES") if self._is_host else self._module.mem_get_info(device_index)[0]

    def pin_memory(
        self, tensor: torch.Tensor, align_bytes: int = 1, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Return the tensor in memory that a GPU can read directly; on CPUs, the tensor itself.

        Args:
            tensor: the tensor.
            align_bytes, make_copy, match_shape: without effect, as with DeepSpeed where torch pins the memory.
        """
        return tensor if self._is_host else tensor.pin_memory()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing, as DeepSpeed does where torch pins the memory: it is freed with the tensor."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a GPU can read the tensor's memory directly."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a device of the kind that the training runs on."""
        return tensor.device.type == self._name


def get_accelerator() -> DeviceAccelerator:
    """Return the device that `initialize` has chosen or, before that call, the one that it would choose by default."""
    return _accelerator(kind_in_use())


@functools.cache
def _accelerator(kind: str) -> DeviceAccelerator:
    """Return the DeviceAccelerator for a kind of device, the same object for each call."""
    return DeviceAccelerator(kind)


def set_accelerator(accelerator: Any) -> None:
    """Refuse the call, because `initialize` chooses the device. It raises ConfigError."""
    raise ConfigError(
        f"set_accelerator({accelerator!r}): initialize() chooses the device by paramserver.device, and without this "
        "key takes the GPU of the local rank, or the CPU if torch finds no GPU; set the key, or CUDA_VISIBLE_DEVICES"
    )


def _pages(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
