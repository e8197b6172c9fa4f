"""The Lion optimizer for plain PyTorch and for the store. It is written here because torch has no Lion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch
from pydantic import Field, NonNegativeFloat
from torch.optim.optimizer import ParamsT

from paramserver.contract.optimizers import lion
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.optimizers.torch_optimizer import (
    ArgumentsSection,
    Beta,
    OptimizerSection,
    ParameterGroup,
    TorchOptimizer,
)


class Lion(torch.optim.Optimizer):
    """Lion of Chen et al., arXiv:2302.06675: a step by the sign of an interpolated moment, with decoupled weight decay.

    The store runs a Lion that is passed to `trainer_client.initialize`. In plain PyTorch it works like torch's own
    optimizers: elementwise, in the dtype of each parameter, with the one state `exp_avg`.

    Args:
        params: parameters or parameter groups.
        lr: the learning rate. The paper advises a rate 3 to 10 times smaller than AdamW's, and a weight decay larger by
            the same factor.
        betas: the decay that interpolates the moment for the step, and the decay of the moment itself.

    Raises:
        ValueError: a hyper-parameter is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"Lion(lr={lr}, betas={betas}, weight_decay={weight_decay}): lr and weight_decay must not be negative, "
                "betas must be in [0, 1)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Return the closure's loss, or None if there is no closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                lion.update(
                    parameter,
                    parameter.grad,
                    state["exp_avg"],
                    lr=float(group["lr"]),
                    beta1=float(beta1),
                    beta2=float(beta2),
                    weight_decay=float(group["weight_decay"]),
                )
        return loss


class LionSection(ArgumentsSection):
    """Hyper-parameters of Lion, with DeepSpeed's defaults, which are not those of the paper."""

    lr: NonNegativeFloat = Field(default=1e-3, description="learning rate")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="decays of the step's moment and of the moment that is kept"
    )
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled")


class LionOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "Lion"."""

    type: Literal["Lion"] = Field(description="the optimizer")
    params: LionSection = Field(default=LionSection(), description="hyper-parameters")


def _to_row(group: ParameterGroup, _: Mapping[str, Any], __: int) -> HyperParameters:
    beta1, beta2 = group["betas"]
    return HyperParameters(
        lion=pb.Lion(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
        )
    )


RECORD = TorchOptimizer(
    torch_class=Lion, section=LionOptimizer, to_row=_to_row, other_names=("FusedLion", "DeepSpeedCPULion")
)
