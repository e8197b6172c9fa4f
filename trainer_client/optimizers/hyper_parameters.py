"""Parameter groups as rows of the wire: which optimizers the store runs, and with which numbers.

Owns the meaning of a group's settings. Must never change a group: they are the user's, and the schedulers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.config.supported_optimizers import why_refused
from trainer_client.errors import ConfigError
from trainer_client.optimizers.lion import Lion

HyperParameters = pb.ApplyGradientsRequest.HyperParameters
ParameterGroup: TypeAlias = dict[str, Any]
# From a group, the optimizer's defaults and a parameter's number of updates with this one.
RowMaker = Callable[[ParameterGroup, Mapping[str, Any], int], HyperParameters]

# They change what an update computes. (`foreach` and `fused` choose a kernel; the store's is the fused one.)
_REFUSED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def row_maker(optimizer: torch.optim.Optimizer) -> RowMaker:
    """How the optimizer's groups become rows.

    Raises:
        ConfigError: the store does not run it. Subclasses are refused too: they may compute something else.
    """
    maker = _ROW_MAKERS.get(type(optimizer))
    if maker is None:
        raise ConfigError(f"optimizer {why_refused(type(optimizer).__name__)}")
    return maker


def check_settings(number: int, group: ParameterGroup) -> None:
    """Raises ConfigError for settings of a group that the store's kernels do not have."""
    if flags := [flag for flag in _REFUSED_FLAGS if group.get(flag)]:
        raise ConfigError(f"{flags[0]}=True of parameter group {number} is not honoured by this version: remove it")
    if group.get("dampening") and not group["momentum"]:
        # torch's buffer begins with the first momentum, ours with the first update; a dampening would tell them apart.
        raise ConfigError(
            f"parameter group {number} has dampening {group['dampening']} and no momentum, without which it has no "
            "effect: set it to 0"
        )


class HyperParameterTable:
    """The distinct rows of a step; most parameters of a model share one.

    Args:
        group_of: the group of each parameter (index in the model) that has one.
        make_row: from the number of a group and an update count.
        update_counts: of each parameter of the model, with the update under way.
    """

    def __init__(
        self,
        group_of: Mapping[int, int],
        make_row: Callable[[int, int], HyperParameters],
        update_counts: Sequence[int],
    ) -> None:
        self.rows: list[HyperParameters] = []
        self._group_of = group_of
        self._make_row = make_row
        self._update_counts = update_counts
        self._known: dict[tuple[int, int], int] = {}

    def row_of(self, parameter: int) -> int:
        """The index of the parameter's row; -1 if it is in no group, and stays as it is."""
        group = self._group_of.get(parameter)
        if group is None:
            return -1
        count = self._update_counts[parameter]
        number = self._known.setdefault((group, count), len(self.rows))
        if number == len(self.rows):
            self.rows.append(self._make_row(group, count))
        return number


def _adam(group: ParameterGroup, _: Mapping[str, Any], update_count: int) -> HyperParameters:
    beta1, beta2 = group["betas"]
    values: dict[str, Any] = {
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "update_count": update_count,
    }
    # torch's AdamW is its Adam with this set.
    if group["decoupled_weight_decay"]:
        return HyperParameters(adamw=pb.AdamW(**values))
    return HyperParameters(adam=pb.Adam(**values))


def _sgd(group: ParameterGroup, _: Mapping[str, Any], update_count: int) -> HyperParameters:
    momentum = float(group["momentum"])
    return HyperParameters(
        sgd=pb.Sgd(
            lr=float(group["lr"]),
            momentum=momentum,
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            # As torch does where a scheduler has brought the momentum down to 0.
            nesterov=bool(group["nesterov"]) and momentum != 0,
            update_count=update_count,
        )
    )


def _lion(group: ParameterGroup, _: Mapping[str, Any], __: int) -> HyperParameters:
    beta1, beta2 = group["betas"]
    return HyperParameters(
        lion=pb.Lion(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
        )
    )


def _adagrad(group: ParameterGroup, defaults: Mapping[str, Any], update_count: int) -> HyperParameters:
    return HyperParameters(
        adagrad=pb.Adagrad(
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            # torch takes it from here, whatever a group says.
            initial_accumulator_value=float(defaults["initial_accumulator_value"]),
            update_count=update_count,
        )
    )


_ROW_MAKERS: Mapping[type[torch.optim.Optimizer], RowMaker] = {
    AdamW: _adam,
    Adam: _adam,
    SGD: _sgd,
    Lion: _lion,
    Adagrad: _adagrad,
}
