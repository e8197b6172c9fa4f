"""The Adagrad optimizer (Duchi et al., JMLR 12, 2011), by torch's fused kernel where torch has one."""

from __future__ import annotations

import torch
from torch.optim.adagrad import adagrad

from paramserver.contract.optimizers.optimizer import Optimizer, States, Tensors, count, is_count, is_not_negative
from paramserver.v1 import parameter_store_pb2 as pb


def _rule(values: pb.Adagrad, weights: Tensors, gradients: Tensors, states: States) -> None:
    squares = states[pb.KIND_SUM]
    if values.update_count == 1:
        for tensor in squares:
            tensor.fill_(values.initial_accumulator_value)
    if weights[0].is_cuda:
        update_without_kernel(values, weights, gradients, squares)
        return
    torch._fused_adagrad_(
        weights,
        gradients,
        squares,
        [count(values.update_count, weights[0].device)] * len(weights),
        lr=values.lr,
        lr_decay=values.lr_decay,
        weight_decay=values.weight_decay,
        eps=values.eps,
        maximize=False,
    )


def update_without_kernel(values: pb.Adagrad, weights: Tensors, gradients: Tensors, squares: Tensors) -> None:
    """Update weights and sums with torch's function of Adagrad, because torch has no fused kernel for CUDA."""
    # Unlike torch's fused kernel, torch's function `adagrad` adds 1 to each weight's update count, in place. So each
    # weight gets a count tensor of its own. The project's function `count` would return one tensor for all weights, and
    # give the changed tensor to its next caller.
    counts = [torch.tensor(float(values.update_count - 1), dtype=torch.float32) for _ in weights]
    adagrad(
        [*weights],
        [*gradients],
        [*squares],
        counts,
        foreach=True,
        lr=values.lr,
        lr_decay=values.lr_decay,
        weight_decay=values.weight_decay,
        eps=values.eps,
        maximize=False,
    )


RECORD = Optimizer(
    name="adagrad",
    states=(pb.KIND_SUM,),
    ranges={
        "lr": is_not_negative,
        "lr_decay": is_not_negative,
        "weight_decay": is_not_negative,
        "eps": is_not_negative,
        "initial_accumulator_value": is_not_negative,
        "update_count": is_count,
    },
    rule=_rule,
    is_counted=True,
)
