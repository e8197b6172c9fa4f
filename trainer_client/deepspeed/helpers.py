"""DeepSpeed's small helper functions and classes, which scripts import from many of DeepSpeed's modules."""

from __future__ import annotations

import argparse
import gc
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from trainer_client import comm
from trainer_client.accelerator import get_accelerator

# The name of the file in which `accelerate launch` writes environment variables for DeepSpeed's own launcher. This
# library has no such launcher and does not read the file; docs/accelerate.md says how a script is started on several
# machines.
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

_GIB = 1 << 30

T = TypeVar("T")
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


def add_config_arguments(parser: Parser) -> Parser:
    """Add DeepSpeed's options to a parser, and return it.

    `--deepspeed_config` is the path of the config, which `initialize(args=...)` reads. `--deepspeed` is a flag for the
    script itself. Old scripts call the two options `--deepscale_config` and `--deepscale`; these names work, but are
    not in the help. As in DeepSpeed, the option `--local_rank` is not added: a script whose launcher passes it has to
    add it by itself.
    """
    group = parser.add_argument_group("DeepSpeed", "the training config")
    group.add_argument(
        "--deepspeed", action="store_true", help="say that the script shall use its engine; initialize() ignores it"
    )
    group.add_argument("--deepspeed_config", metavar="PATH", default=None, help="the JSON file of the config")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, help=argparse.SUPPRESS)
    return parser


class RepeatingLoader(Generic[T]):
    """An iterator over a data loader that begins it again whenever it ends.

    The loader that `initialize(training_data=...)` returns can be wrapped, too, because it counts its epochs by itself.

    Args:
        loader: the data loader. Each `iter(loader)` begins one more pass over the data.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next batch. Raise StopIteration only if the loader is empty."""
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """A context that sets the default device and the default dtype of tensors.

        with OnDevice(dtype=torch.bfloat16, device="meta"):
            model = Model()

    A tensor for which the model's code names a device or a dtype gets that device or dtype. If the model is on the meta
    device, `trainer_client.initialize` computes its initial values with the functions of its modules, such as
    `reset_parameters`. Values that constructors compute in other ways are lost, unless the model is built under
    `trainer_client.zero.Init`.

    Args:
        dtype: the dtype of floating-point tensors.
        device: the device, as torch writes it.
        enabled: whether the context has an effect.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._context = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._context.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._context.enter_context(torch.device(self.device))
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print on rank 0 how much memory of the device and of the machine is in use, and reset the peak figures.

    Args:
        message: a line that is printed before the figures.
        force: whether the figures are printed. If false, the call does nothing, as in DeepSpeed, so that calls can stay
            in a script.
    """
    if not force or comm.get_rank() != 0:
        return
    # Garbage is collected first, because the memory of unused objects in reference cycles would be counted as used.
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
    """Give memory that torch has cached back to the device, and reset the peak figures."""
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
        criterion_func: returns whether a tensor stays the same object and only its `data` is moved.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item.to(device)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` (any pytree) with copies of its tensors on `device`.

    The storage of a copy has the size of the tensor. Without the copy, `torch.save` would write the whole storage of a
    tensor that is a view of a larger one.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True)

    return tree_map_only(torch.Tensor, copy, item)


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the attribute at a dotted path, for example the submodule "layers.0.linear" of `model`.

    Raises:
        AttributeError: there is no attribute of one of the names.
    """
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set the attribute at a dotted path to `module`.

    Raises:
        AttributeError: there is no attribute of one of the names before the last one.
    """
    *parents, name = module_name.split(".")
    setattr(reduce(getattr, parents, model), name, module)


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Return whether torch's version is at least `min_version` and at most `max_version`; None is no limit.

    Raises:
        ValueError: neither limit is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version(): give min_version or max_version")
    is_late = min_version is None or torch.__version__ >= str(min_version)
    is_early = max_version is None or torch.__version__ <= str(max_version)
    return is_late and is_early
