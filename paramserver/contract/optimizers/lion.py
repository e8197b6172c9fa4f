"""The Lion optimizer (Chen et al., arXiv:2302.06675), in torch operations because torch has no kernel for it."""

from __future__ import annotations

import torch

from paramserver.contract.optimizers.optimizer import Optimizer, States, Tensors, is_beta, is_not_negative
from paramserver.v1 import parameter_store_pb2 as pb


def update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Update the weight and the first moment in place, by algorithm 2 of the paper."""
    weight.mul_(1.0 - lr * weight_decay)
    direction = exp_avg.mul(beta1).add_(gradient, alpha=1.0 - beta1).sign_()
    weight.add_(direction, alpha=-lr)
    exp_avg.mul_(beta2).add_(gradient, alpha=1.0 - beta2)


def _rule(values: pb.Lion, weights: Tensors, gradients: Tensors, states: States) -> None:
    for weight, gradient, exp_avg in zip(weights, gradients, states[pb.KIND_EXP_AVG], strict=True):
        update(
            weight,
            gradient,
            exp_avg,
            lr=values.lr,
            beta1=values.beta1,
            beta2=values.beta2,
            weight_decay=values.weight_decay,
        )


RECORD = Optimizer(
    name="lion",
    states=(pb.KIND_EXP_AVG,),
    ranges={"lr": is_not_negative, "beta1": is_beta, "beta2": is_beta, "weight_decay": is_not_negative},
    rule=_rule,
)
