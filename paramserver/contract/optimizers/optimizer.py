"""The record of an optimizer: which states it keeps, which hyper-parameters make sense, and its arithmetic.

The daemon applies the rule to what it stores, a trainer to what it keeps on its own device: one function, so that both
give the same bits. All rules are elementwise: on the CPU, ranges that are cut at multiples of 16 elements get the bits
of the whole.
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
States: TypeAlias = Mapping[Kind, torch.Tensor]
Range: TypeAlias = Callable[[float], bool]


def _always(_: Any) -> bool:
    return True


def _never_wrong(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer that the store runs. `values` below is the optimizer's message in `HyperParameters`.

    Attributes:
        name: the name of that message's field in the contract.
        states: the kinds that the rule reads and writes beside the weight.
        ranges: for each field of the message that is a number, whether a value makes sense. The ranges are those that
            the optimizer's class in torch has.
        rule: updates weight and states [n] in place, on any device, given (values, weight, gradient, states): all fp32,
            the gradient unscaled and clipped. The rule may overwrite the gradient.
        needs_states: whether an update with these values uses the states at all.
        find_conflict: what is wrong with values of which each is in its range; None: nothing.
    """

    name: str
    states: tuple[Kind, ...]
    ranges: Mapping[str, Range]
    rule: Callable[[Any, torch.Tensor, torch.Tensor, States], None]
    needs_states: Callable[[Any], bool] = _always
    find_conflict: Callable[[Any], str | None] = _never_wrong


def is_not_negative(value: float) -> bool:
    """Return whether the value is finite and at least 0."""
    return math.isfinite(value) and value >= 0


def is_beta(value: float) -> bool:
    """Return whether the value can be the decay of a moment."""
    return 0 <= value < 1


def is_count(value: float) -> bool:
    """Return whether the value can be the number of an update, exact as a floating-point number."""
    return 0 < value < 1 << 53


@functools.lru_cache(maxsize=8)
def count(update_count: int, device: torch.device) -> torch.Tensor:
    """Return the number of an update in the form that torch's kernels take. The kernels only read the tensor."""
    return torch.tensor(float(update_count), device=device)
