"""Which parameters' gradients are added up over the ranks in the dtype of autocast.

This module owns the mark of such a parameter: an attribute with the same name as DeepSpeed's, because scripts read it.
This module must never change a value: step/gradient_group.py reduces the gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn

from trainer_client.errors import ConfigError

MARK = "comm_dtype"


def mark_reduction_dtypes(model: nn.Module, dtype: torch.dtype | None, classes: Iterable[str]) -> None:
    """Mark the parameters of modules of the given classes, and take all other marks of the model away.

    Args:
        dtype: the dtype in which the gradients of these parameters are added up; None: no parameter is marked.
        classes: names of classes with the Python module in front, as "torch.nn.Linear". As with DeepSpeed, modules of
            derived classes are not marked.

    Raises:
        ConfigError: there is no such class in this process.
    """
    for parameter in model.parameters():
        if hasattr(parameter, MARK):
            delattr(parameter, MARK)
    if dtype is None:
        return
    wanted = {_find(name) for name in classes}
    for module in model.modules():
        if type(module) in wanted:
            for parameter in module.parameters(recurse=False):
                setattr(parameter, MARK, dtype)


def marked_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which a parameter's gradient is added up over the ranks; None if it has no mark."""
    return getattr(parameter, MARK, None)


def _find(name: str) -> type:
    """Return a class by its name. Nothing is imported, because the modules of a model are imported already."""
    place, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(place), attribute, None)
    if not isinstance(found, type):
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules names {name!r}, which is no class of an imported module: "
            "write the class of a module of the model with its Python module, as torch.nn.Linear"
        )
    return found
