"""The SGD optimizer with or without momentum, by torch's fused kernel.

The docstring of torch.optim.SGD says how its momentum differs from the one of Sutskever et al.
"""

from __future__ import annotations

import math

import torch

from paramserver.contract.optimizers.optimizer import Optimizer, States, Tensors, is_count, is_not_negative
from paramserver.v1 import parameter_store_pb2 as pb


def _rule(values: pb.Sgd, weights: Tensors, gradients: Tensors, states: States) -> None:
    torch._fused_sgd_(
        weights,
        gradients,
        states[pb.KIND_MOMENTUM_BUFFER] if values.momentum != 0 else [],
        weight_decay=values.weight_decay,
        momentum=values.momentum,
        lr=values.lr,
        dampening=values.dampening,
        nesterov=values.nesterov,
        maximize=False,
        # With this flag torch sets the momentum buffer to the gradient, as in the first update of a weight.
        is_first_step=values.momentum != 0 and values.update_count == 1,
    )


def _needs_states(values: pb.Sgd) -> bool:
    return values.momentum != 0


def _find_conflict(values: pb.Sgd) -> str | None:
    if values.nesterov and (values.momentum == 0 or values.dampening != 0):
        return f"sgd.nesterov needs a momentum and no dampening; they are {values.momentum} and {values.dampening}"
    return None


RECORD = Optimizer(
    name="sgd",
    states=(pb.KIND_MOMENTUM_BUFFER,),
    ranges={
        "lr": is_not_negative,
        "momentum": is_not_negative,
        "dampening": math.isfinite,
        "weight_decay": is_not_negative,
        "update_count": is_count,
    },
    rule=_rule,
    needs_states=_needs_states,
    find_conflict=_find_conflict,
)
