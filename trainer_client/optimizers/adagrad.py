"""torch.optim.Adagrad as the store runs it: its section of the config, and its record (see torch_optimizer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.standing import Refused
from trainer_client.optimizers.torch_optimizer import (
    OptimizerSection,
    ParameterGroup,
    TorchArgumentsSection,
    TorchOptimizer,
)


class AdagradSection(TorchArgumentsSection):
    """Hyper-parameters of `torch.optim.Adagrad`, with its defaults."""

    lr: NonNegativeFloat = Field(default=1e-2, description="learning rate")
    lr_decay: NonNegativeFloat = Field(default=0.0, description="by which the rate falls with the steps")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="added to the gradient")
    initial_accumulator_value: NonNegativeFloat = Field(default=0.0, description="with which the sums begin")
    eps: NonNegativeFloat = Field(default=1e-10, description="added to the root of the sum")
    amsgrad: Annotated[
        bool,
        Refused(why="Adagrad has no such variant", instead="set it to false"),
        Field(description="an argument that DeepSpeed's class ignores"),
    ] = False


class AdagradOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "Adagrad"."""

    type: Literal["Adagrad"] = Field(description="the optimizer")
    params: AdagradSection = Field(default=AdagradSection(), description="hyper-parameters")


def _to_row(group: ParameterGroup, defaults: Mapping[str, Any], update_count: int) -> HyperParameters:
    return HyperParameters(
        adagrad=pb.Adagrad(
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            # `initial_accumulator_value` is taken from the optimizer's defaults, because torch does so and ignores the
            # value in a parameter group.
            initial_accumulator_value=float(defaults["initial_accumulator_value"]),
            update_count=update_count,
        )
    )


RECORD = TorchOptimizer(
    torch_class=torch.optim.Adagrad,
    section=AdagradOptimizer,
    to_row=_to_row,
    other_names=("DeepSpeedCPUAdagrad",),
)
