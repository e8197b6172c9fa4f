"""The device that a rank computes on: the CPU, or an accelerator of any kind that torch.accelerator knows.

This module owns the choice of the device, and the functions that torch.accelerator lacks, because torch has them in a
module for each kind of device (torch.cuda, torch.xpu). It must never replace a device that the script has chosen
itself.
"""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist

from trainer_client.errors import ConfigError

AUTO = "auto"
CPU = "cpu"

# The environment variable that says which devices a process sees, for each kind of device. Error messages name it.
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES", "xpu": "ZE_AFFINITY_MASK"}

_WITH_INDEX = re.compile(r"[a-z][a-z0-9_]*(:[0-9]+)?")


class _GpuProcess:
    """The device that this process computes on; None if no rank was opened in it yet."""

    device: torch.device | None

    def __init__(self) -> None:
        self.device = None


_process = _GpuProcess()


def check_setting(setting: str) -> str:
    """Return a value of `paramserver.device` if it is well-formed, whatever devices there are.

    It can raise ValueError.
    """
    kind, colon, _ = setting.partition(":")
    if _WITH_INDEX.fullmatch(setting) is None or (colon and kind in (AUTO, CPU)):
        raise ValueError("write 'auto', 'cpu', or a kind of accelerator without or with its index: 'cuda', 'cuda:1'")
    return setting


def kind_of(setting: str) -> str:
    """Return the kind of device that a value of `paramserver.device` means here: "cpu", "cuda", "xpu" and so on.

    Raises:
        ConfigError: torch finds no device of this kind.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = setting.partition(":")[0]
    if kind == AUTO:
        return CPU if found is None else found.type
    if kind != CPU and (found is None or found.type != kind):
        here = "no accelerator" if found is None else f"{found.type} devices"
        raise ConfigError(
            f"paramserver.device is {setting!r}, and torch finds {here} on this machine: write 'auto' or 'cpu', or "
            "install a build of torch for the device and its driver"
        )
    return kind


def choose(setting: str) -> torch.device:
    """Return the device for a value of `paramserver.device`; see docs/config.md for the rules.

    Args:
        setting: "auto", "cpu", or a kind of accelerator without or with an index, as "cuda" and "cuda:1".

    Raises:
        ConfigError: torch finds no such device, or the process sees several and none of them is this rank's.
    """
    kind = kind_of(setting)
    if kind == CPU:
        return torch.device(CPU)
    count = torch.accelerator.device_count()
    index = setting.partition(":")[2]
    if not index:
        return torch.device(kind, _index(kind, count))
    if int(index) >= count:
        raise ConfigError(
            f"paramserver.device is {setting!r}, and this process sees {count} {kind} devices, counted from 0: write "
            f"another index, or {_visible(kind)}"
        )
    return torch.device(kind, int(index))


def _index(kind: str, count: int) -> int:
    """Return the index of this rank's device among the `count` devices that the process sees."""
    current = torch.accelerator.current_device_index()
    if current:
        # Each process begins with device 0 as its current device. The current device is another one, so the script has
        # chosen it, and this rank uses it.
        return current
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank < count:
        return local_rank
    if count == 1:
        # The launcher has made only one device visible to this rank, so the rank uses index 0, although its local rank
        # is higher.
        return 0
    raise ConfigError(
        f"LOCAL_RANK is {local_rank}, and this process sees {count} {kind} devices: start as many ranks as the node "
        f"has devices, let each rank see one device or all of them with {_visible(kind)}, or write "
        f"'{kind}:INDEX' into paramserver.device"
    )


def _visible(kind: str) -> str:
    """Return the text for errors that names the variable which limits the devices of a process, and its value."""
    name = visible_devices_variable(kind)
    if name is None:
        return f"the variable that says which {kind} devices a process sees"
    value = os.environ.get(name)
    return f"{name} (which is not set)" if value is None else f"{name} (which is {value!r})"


def visible_devices_variable(kind: str) -> str | None:
    """Return the name of the environment variable that limits which devices of a kind a process sees.

    Return None if no such variable is known for this kind.
    """
    return _VISIBLE_DEVICES.get(kind)


def use(device: torch.device) -> None:
    """Make `device` the one that this process computes on, and torch's current one if it is an accelerator."""
    if device.type != CPU:
        torch.accelerator.set_device_index(device.index)
    _process.device = device


def in_use() -> torch.device | None:
    """Return the device that this process computes on; None if no rank was opened yet."""
    return _process.device


def kind_in_use() -> str:
    """Return the kind of the device that this process computes on, or that "auto" means if no rank was opened yet."""
    return kind_of(AUTO) if _process.device is None else _process.device.type


def wait_for_stream(device: torch.device) -> None:
    """Wait until the device has done what the calling thread's current stream was given. Does nothing on the CPU."""
    if device.type != CPU:
        torch.accelerator.current_stream(device).synchronize()


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of an accelerator's memory that are free for this process, and those that it has.

    Memory that torch has taken and does not use counts as free. None if torch has no figures for this kind of device.
    """
    try:
        free, total = torch.accelerator.get_memory_info(device)
        unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except RuntimeError:
        # torch raises RuntimeError for a backend outside of torch whose allocator has no figures that torch can ask
        # for.
        return None
    return free + unused, total


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of an accelerator's random generator, uint8 on the CPU."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of an accelerator's random generator."""
    torch.get_device_module(device).set_rng_state(state, device)


def backend_of(kind: str) -> str:
    """Return the backend of torch.distributed for tensors on a kind of device: "nccl" for "cuda", "gloo" for "cpu"."""
    return dist.get_default_backend_for_device(kind)
