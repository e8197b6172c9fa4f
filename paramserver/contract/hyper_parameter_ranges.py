"""Which hyper-parameters make sense: those that the optimizers' classes in torch take, and no others.

The daemon asks before it works with what comes in, a trainer before it begins a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from paramserver.v1 import parameter_store_pb2 as pb


def find_problem(row: pb.ApplyGradientsRequest.HyperParameters) -> str | None:
    """What is wrong with a row, with the name of its field; None: nothing."""
    optimizer = row.WhichOneof("optimizer")
    if optimizer is None:
        return f"hyper_parameters.optimizer is not set; known are {', '.join(_RANGES)}"
    values = getattr(row, optimizer)
    for field, is_good in _RANGES[optimizer].items():
        value = getattr(values, field)
        if not is_good(value):
            return f"{optimizer}.{field} = {value} is out of its range"
    if optimizer == "sgd" and values.nesterov and (values.momentum == 0 or values.dampening != 0):
        return f"sgd.nesterov needs a momentum and no dampening; they are {values.momentum} and {values.dampening}"
    return None


def _is_not_negative(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _is_beta(value: float) -> bool:
    return 0 <= value < 1


def _is_count(value: float) -> bool:
    return 0 < value < 1 << 53


_ADAM: Mapping[str, Callable[[float], bool]] = {
    "lr": _is_not_negative,
    "beta1": _is_beta,
    "beta2": _is_beta,
    "eps": _is_not_negative,
    "weight_decay": _is_not_negative,
    "update_count": _is_count,
}
_RANGES: Mapping[str, Mapping[str, Callable[[float], bool]]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": {
        "lr": _is_not_negative,
        "momentum": _is_not_negative,
        "dampening": math.isfinite,
        "weight_decay": _is_not_negative,
        "update_count": _is_count,
    },
    "lion": {"lr": _is_not_negative, "beta1": _is_beta, "beta2": _is_beta, "weight_decay": _is_not_negative},
    "adagrad": {
        "lr": _is_not_negative,
        "lr_decay": _is_not_negative,
        "weight_decay": _is_not_negative,
        "eps": _is_not_negative,
        "initial_accumulator_value": _is_not_negative,
        "update_count": _is_count,
    },
}
