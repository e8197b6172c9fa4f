"""The record of torch.optim.Adam, and the code shared with AdamW, which is torch's Adam with decoupled decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.optimizers.torch_optimizer import (
    ArgumentsSection,
    Beta,
    OptimizerSection,
    ParameterGroup,
    TorchOptimizer,
)


class AdamSection(ArgumentsSection):
    """Hyper-parameters of DeepSpeed's `Adam`, which is AdamW unless `adam_w_mode` is false."""

    lr: NonNegativeFloat = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    # With false, DeepSpeed would use kernels of its own. The store's kernels are torch's.
    torch_adam: Literal[True] = True
    adam_w_mode: bool = True

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's Adam; with `decoupled_weight_decay` it computes AdamW."""
        values = self.model_dump(exclude={"torch_adam", "adam_w_mode"})
        return values | {"decoupled_weight_decay": self.adam_w_mode}


class AdamOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "Adam"."""

    type: Literal["Adam"]
    params: AdamSection = AdamSection()


def to_row(group: ParameterGroup, _: Mapping[str, Any], update_count: int) -> HyperParameters:
    """Return the row of a group of torch's Adam or AdamW. `decoupled_weight_decay` says which of them it is."""
    beta1, beta2 = group["betas"]
    values: dict[str, Any] = {
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "update_count": update_count,
    }
    if group["decoupled_weight_decay"]:
        return HyperParameters(adamw=pb.AdamW(**values))
    return HyperParameters(adam=pb.Adam(**values))


ADAM = TorchOptimizer(torch_class=torch.optim.Adam, section=AdamOptimizer, to_row=to_row)
