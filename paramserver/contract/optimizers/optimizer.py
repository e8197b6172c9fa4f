"""The class that describes an optimizer: its states, the valid ranges of its hyper-parameters, and its arithmetic.

The daemon applies the rule to the states that it stores, and a trainer to the states on its own device. Both use the
same function, so both give the same bits. Each rule is elementwise: on the CPU, parts of a tensor that are cut at
multiples of 16 elements get the same bits as the whole tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from paramserver.contract.kinds import Kind
from paramserver.v1 import parameter_store_pb2 as pb

HyperParameters: TypeAlias = pb.ApplyGradientsRequest.HyperParameters
Tensors: TypeAlias = list[torch.Tensor]
States: TypeAlias = Mapping[Kind, Tensors]
Range: TypeAlias = Callable[[float], bool]


def _always(_: Any) -> bool:
    return True


def _never_wrong(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer that the store runs. Below, `values` is the optimizer's message in `HyperParameters`.

    Attributes:
        name: the name of that message's field in the contract.
        states: the kinds that the rule reads and writes in addition to the weight.
        ranges: for each numeric field of the message, a function that returns whether a value is valid. The ranges are
            those of the optimizer's class in torch.
        rule: a function of (values, weights, gradients, states) that updates weights and states in place, on any
            device. Each list has one tensor for each weight, and those at one index are [n] fp32. A kernel gets all of
            them in one call, because each launch on a GPU takes some microseconds. The gradients are unscaled and
            clipped; the rule may overwrite them.
        needs_states: returns whether an update with these values uses the states at all.
        is_counted: whether torch's state of a parameter has the number of its updates, "step", beside these states.
        find_conflict: returns what is wrong with values that are each in their range, or None if nothing is wrong.
    """

    name: str
    states: tuple[Kind, ...]
    ranges: Mapping[str, Range]
    rule: Callable[[Any, Tensors, Tensors, States], None]
    needs_states: Callable[[Any], bool] = _always
    is_counted: bool = False
    find_conflict: Callable[[Any], str | None] = _never_wrong


def is_not_negative(value: float) -> bool:
    """Return whether the value is finite and at least 0."""
    return math.isfinite(value) and value >= 0


def is_beta(value: float) -> bool:
    """Return whether the value can be the decay rate of a moment."""
    return 0 <= value < 1


def is_count(value: float) -> bool:
    """Return whether the value can be the number of an update and is exact as a floating-point number."""
    return 0 < value < 1 << 53


@functools.lru_cache(maxsize=8)
def count(update_count: int, device: torch.device) -> torch.Tensor:
    """Return the number of an update in the form that torch's kernels take. The kernels only read the tensor."""
    # The tensor of the update count is fp32 and not torch.get_default_dtype(), because bf16 cannot represent the number
    # 257 and the kernels for CUDA read fp32.
    return torch.tensor(float(update_count), dtype=torch.float32, device=device)
