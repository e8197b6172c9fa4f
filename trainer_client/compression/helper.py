"""The helpers of `deepspeed.compression.helper` that scripts import to replace modules, as those for LoRA do."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import nn

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the attribute at a dotted path, as `model.layers.0.linear` for "layers.0.linear".

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
