"""torch.optim.SGD, with or without momentum: its section of the config, and its record (see torch_optimizer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.optimizers.torch_optimizer import (
    OptimizerSection,
    ParameterGroup,
    TorchArgumentsSection,
    TorchOptimizer,
)


class SgdSection(TorchArgumentsSection):
    """Hyper-parameters of `torch.optim.SGD`, with its defaults."""

    lr: NonNegativeFloat = Field(default=1e-3, description="learning rate")
    momentum: NonNegativeFloat = Field(default=0.0, description="decay of the momentum; 0: there is none")
    dampening: float = Field(default=0.0, description="part of the gradient that the momentum leaves out")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="added to the gradient")
    nesterov: bool = Field(default=False, description="Nesterov's momentum")


class SgdOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "SGD"."""

    type: Literal["SGD"] = Field(description="the optimizer")
    params: SgdSection = Field(default=SgdSection(), description="hyper-parameters")


def _to_row(group: ParameterGroup, _: Mapping[str, Any], update_count: int) -> HyperParameters:
    momentum = float(group["momentum"])
    return HyperParameters(
        sgd=pb.Sgd(
            lr=float(group["lr"]),
            momentum=momentum,
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            # A scheduler may have lowered the momentum to 0. torch then ignores `nesterov`, so the store gets
            # `nesterov=False`.
            nesterov=bool(group["nesterov"]) and momentum != 0,
            update_count=update_count,
        )
    )


def _find_problem(group: ParameterGroup) -> str | None:
    if group.get("dampening") and not group["momentum"]:
        # A parameter group with dampening and without momentum is refused, because a scheduler may raise the momentum
        # later. torch makes the momentum buffer at the first update that has a momentum, and the store makes it at the
        # parameter's first update. With a dampening, the two buffers would then begin with different values.
        return f"has dampening {group['dampening']} and no momentum, without which it has no effect: set it to 0"
    return None


RECORD = TorchOptimizer(torch_class=torch.optim.SGD, section=SgdOptimizer, to_row=_to_row, find_problem=_find_problem)
