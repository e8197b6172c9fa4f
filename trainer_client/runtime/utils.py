"""The helpers of `deepspeed.runtime.utils` that scripts import."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_client import comm
from trainer_client.accelerator import get_accelerator

__all__ = ["empty_cache", "ensure_directory_exists", "move_to_device", "see_memory_usage", "set_random_seed"]

_GIB = 1 << 30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory of the device and of the machine on rank 0, and begin a new peak.

    Args:
        message: a line that is printed before.
        force: False: do nothing, as in DeepSpeed, so that calls can stay in a script.
    """
    if not force or comm.get_rank() != 0:
        return
    # Memory of objects in reference cycles would be counted as used.
    gc.collect()
    device = get_accelerator()
    total, free = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    print(message)
    print(
        f"{device.device_name()}: allocated {device.memory_allocated() / _GIB:.2f} GiB, "
        f"at most {device.max_memory_allocated() / _GIB:.2f}; "
        f"reserved {device.memory_reserved() / _GIB:.2f}, at most {device.max_memory_reserved() / _GIB:.2f}"
    )
    print(f"machine: {(total - free) / _GIB:.2f} of {total / _GIB:.2f} GiB are not free")
    device.reset_peak_memory_stats()


def empty_cache() -> None:
    """Give memory that torch has cached back to the device, and begin a new peak."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str | Path) -> None:
    """Make the directory that a file is to be written to."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return a tensor or module, or lists, tuples and dicts of them, on another device.

    Args:
        criterion_func: chooses the tensors that stay the same objects, so that only their memory is moved.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item.to(device)
