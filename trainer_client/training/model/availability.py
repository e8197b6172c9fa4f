"""The attributes by which scripts for DeepSpeed find out whether a parameter has to be gathered before it is copied.

This module owns their names: `ds_id`, `ds_status`, `ds_shape`, `ds_numel`, `ds_tensor`, of which only the shape and the
dtype mean something, `ds_persist`, which is always False, because no parameter stays whole for its size alone, and
`ds_active_sub_modules`, which is for callers that clear it. Nothing of this library reads them.
It also owns the methods with which a module moves parameters that were built under `zero.Init` and have no values.

[Note: how the status changes] The class of a released parameter has a property `ds_status`, which hides the attribute
of the same name that the parameter itself has. So the status changes with the parameter's class, and a gather costs
nothing more. A parameter that was built under `zero.Init` keeps its class, so its own attribute changes.
"""

from __future__ import annotations

import enum
from functools import partial
from typing import Any

import torch
from torch import nn


class ZeroParamStatus(enum.Enum):
    """DeepSpeed's states of a parameter. INFLIGHT never occurs here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class UnavailableParameter(nn.Parameter):
    """The base of the class of released parameters."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        return ZeroParamStatus.NOT_AVAILABLE


# The methods with which torch.nn.Module moves its parameters to a device.
_MOVES = ("to", "cuda")
_ATTRIBUTES = ("ds_active_sub_modules", "ds_id", "ds_shape", "ds_numel", "ds_persist", "ds_status", "ds_tensor")


def hide_status(parameter: nn.Parameter) -> None:
    """Take DeepSpeed's attributes away from a parameter; idempotent."""
    for name in _ATTRIBUTES:
        vars(parameter).pop(name, None)


def show_status(parameter: nn.Parameter, status: ZeroParamStatus) -> None:
    """Give a parameter DeepSpeed's attributes, or another status if it has them."""
    own = vars(parameter)
    if "ds_id" not in own:
        own.update({"ds_id": id(parameter), "ds_shape": parameter.shape, "ds_numel": parameter.numel()})
        own["ds_persist"] = False
    own["ds_status"] = status
    for name in _MOVES:
        own.pop(name, None)


def stay_on_moves(parameter: nn.Parameter) -> None:
    """Have `module.to(device)` and `module.cuda()` leave a parameter without values, until another status is shown.

    There is nothing to move: a parameter gets its values where the config puts them. torch ends such a call of a module
    with "Cannot copy out of meta tensor". A change of the dtype is made as torch makes it.
    """
    vars(parameter).update({"to": partial(_to, parameter), "cuda": partial(_cuda, parameter)})


def _to(parameter: nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor:
    _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return parameter if dtype is None else torch.Tensor.to(parameter, dtype)


def _cuda(parameter: nn.Parameter, *_: Any, **__: Any) -> torch.Tensor:
    return parameter


def part_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [numel] without values, which stands for this rank's part of a parameter."""
    return torch.empty(numel, dtype=dtype, device="meta")


def show_part(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Give a parameter DeepSpeed's attribute with a tensor that stands for this rank's part of it."""
    vars(parameter)["ds_tensor"] = part
