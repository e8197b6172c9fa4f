"""The record of torch.optim.Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.optimizers.torch_optimizer import ArgumentsSection, OptimizerSection, ParameterGroup, TorchOptimizer


class AdagradSection(ArgumentsSection):
    """Hyper-parameters of `torch.optim.Adagrad`, with its defaults."""

    lr: NonNegativeFloat = 1e-2
    lr_decay: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-10


class AdagradOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "Adagrad"."""

    type: Literal["Adagrad"]
    params: AdagradSection = AdagradSection()


def _to_row(group: ParameterGroup, defaults: Mapping[str, Any], update_count: int) -> HyperParameters:
    return HyperParameters(
        adagrad=pb.Adagrad(
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            # torch takes this value from the optimizer's defaults and ignores a group's own value.
            initial_accumulator_value=float(defaults["initial_accumulator_value"]),
            update_count=update_count,
        )
    )


ADAGRAD = TorchOptimizer(torch_class=torch.optim.Adagrad, section=AdagradOptimizer, to_row=_to_row)
