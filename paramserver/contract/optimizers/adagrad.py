"""The Adagrad optimizer (Duchi et al., JMLR 12, 2011), by torch's fused kernel."""

from __future__ import annotations

import torch

from paramserver.contract.optimizers.optimizer import Optimizer, States, count, is_count, is_not_negative
from paramserver.v1 import parameter_store_pb2 as pb


def _rule(values: pb.Adagrad, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    squares = states[pb.KIND_SUM]
    if values.update_count == 1:
        squares.fill_(values.initial_accumulator_value)
    torch._fused_adagrad_(
        [weight],
        [gradient],
        [squares],
        [count(values.update_count, weight.device)],
        lr=values.lr,
        lr_decay=values.lr_decay,
        weight_decay=values.weight_decay,
        eps=values.eps,
        maximize=False,
    )


ADAGRAD = Optimizer(
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
)
