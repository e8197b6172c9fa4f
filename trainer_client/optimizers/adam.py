"""The record of torch.optim.Adam, and the code shared with AdamW, which is torch's Adam with decoupled decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, model_validator

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.standing import Refused
from trainer_client.optimizers.torch_optimizer import (
    Beta,
    OptimizerSection,
    ParameterGroup,
    TorchArgumentsSection,
    TorchOptimizer,
)

# The update count that the kernel gets if bias_correction is false. The kernel divides the moments by 1 - beta **
# count. With this count, which a float represents exactly, the divisor is 1 for every beta below 1 - 2**-46.
_UNCORRECTED = 2**52


class AdamArgumentsSection(TorchArgumentsSection):
    """The hyper-parameters that DeepSpeed's `Adam` and `AdamW` share.

    DeepSpeed runs kernels of its own unless `torch_adam` is true. Here the kernel is always torch's, but the default of
    `weight_decay` depends on this key as in DeepSpeed.

    Attributes:
        always_decoupled: whether the weight decay is decoupled even if `adam_w_mode` is false.
    """

    always_decoupled: ClassVar[bool] = False

    lr: NonNegativeFloat = Field(default=1e-3, description="learning rate")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="decays of the two moments")
    eps: NonNegativeFloat = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="with `torch_adam` and decoupled decay the default is torch's, 0.01"
    )
    torch_adam: bool | str = Field(
        default=False, description="the kernel gives the bits of torch's either way; see `weight_decay`"
    )
    bias_correction: bool = Field(
        default=True, description="divide the moments by what their decays leave out at first"
    )
    amsgrad: Annotated[
        bool,
        Refused(why="the store keeps no maxima of second moments", instead="set it to false"),
        Field(description="the AMSGrad variant"),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's class, which has no `torch_adam` and no `bias_correction`."""
        values = super().arguments()
        del values["torch_adam"], values["bias_correction"]
        return values

    def group_settings(self) -> dict[str, Any]:
        """Return the settings of the parameter groups that torch's class does not take as arguments."""
        return {"bias_correction": self.bias_correction}

    @model_validator(mode="before")
    @classmethod
    def _default_of_torch(cls, value: Any) -> Any:
        """Add the default weight decay of torch.optim.AdamW if DeepSpeed would make an AdamW without that argument."""
        if not isinstance(value, Mapping) or not value.get("torch_adam"):
            return value
        is_decoupled = cls.always_decoupled or value.get("adam_w_mode", True)
        return {"weight_decay": 1e-2, **value} if is_decoupled else value


class AdamSection(AdamArgumentsSection):
    """Hyper-parameters of DeepSpeed's `Adam`, which is AdamW unless `adam_w_mode` is false."""

    adam_w_mode: bool = Field(default=True, description="decoupled weight decay, as in DeepSpeed: it is AdamW then")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's Adam; with `decoupled_weight_decay` it computes AdamW."""
        values = super().arguments()
        return values | {"decoupled_weight_decay": values.pop("adam_w_mode")}


class AdamOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "Adam"."""

    type: Literal["Adam"] = Field(description="the optimizer")
    params: AdamSection = Field(default=AdamSection(), description="hyper-parameters")


def to_row(group: ParameterGroup, _: Mapping[str, Any], update_count: int) -> HyperParameters:
    """Return the hyper-parameters of one update of a parameter in a group of torch's Adam or AdamW.

    The group's `decoupled_weight_decay` tells AdamW from Adam. If the group's `bias_correction` is false, which
    DeepSpeed's classes allow, the result has the count _UNCORRECTED, with which the kernel corrects nothing.
    """
    beta1, beta2 = group["betas"]
    if not group.get("bias_correction", True):
        update_count = _UNCORRECTED
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


RECORD = TorchOptimizer(
    torch_class=torch.optim.Adam,
    section=AdamOptimizer,
    to_row=to_row,
    other_names=("FusedAdam", "DeepSpeedCPUAdam", "CPUAdam"),
)
