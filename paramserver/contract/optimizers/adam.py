"""The Adam optimizer (Kingma & Ba, arXiv:1412.6980), by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paramserver.contract.optimizers.optimizer import (
    Optimizer,
    Range,
    States,
    Tensors,
    count,
    is_beta,
    is_count,
    is_not_negative,
)
from paramserver.v1 import parameter_store_pb2 as pb

# AdamW has the same states and ranges as Adam, and a kernel with the same arguments.
STATES = (pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ)
RANGES: Mapping[str, Range] = {
    "lr": is_not_negative,
    "beta1": is_beta,
    "beta2": is_beta,
    "eps": is_not_negative,
    "weight_decay": is_not_negative,
    "update_count": is_count,
}


def update(
    kernel: Callable[..., None],
    values: pb.Adam | pb.AdamW,
    weights: Tensors,
    gradients: Tensors,
    states: States,
) -> None:
    """Run torch's fused kernel of Adam or of AdamW."""
    kernel(
        weights,
        gradients,
        states[pb.KIND_EXP_AVG],
        states[pb.KIND_EXP_AVG_SQ],
        [],
        [count(values.update_count, weights[0].device)] * len(weights),
        amsgrad=False,
        maximize=False,
        beta1=values.beta1,
        beta2=values.beta2,
        lr=values.lr,
        weight_decay=values.weight_decay,
        eps=values.eps,
    )


def _rule(values: pb.Adam, weights: Tensors, gradients: Tensors, states: States) -> None:
    update(torch._fused_adam_, values, weights, gradients, states)


RECORD = Optimizer(name="adam", states=STATES, ranges=RANGES, rule=_rule, is_counted=True)
