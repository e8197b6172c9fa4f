"""The optimizers that the store runs, and what a row of hyper-parameters asks of them.

A new optimizer is a message in the contract's HyperParameters, a module beside this one with its record, and an entry
in the tuple below; trainer_client/optimizers/registry.py has its other half.

torch's fused kernels are called as such, not by the functions of torch.optim, whose bookkeeping takes longer than the
kernel needs for ten thousand elements, and more than that where the processor's cache is full of states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paramserver.contract.kinds import Kind
from paramserver.contract.optimizers.adagrad import ADAGRAD
from paramserver.contract.optimizers.adam import ADAM
from paramserver.contract.optimizers.adamw import ADAMW
from paramserver.contract.optimizers.lion import LION
from paramserver.contract.optimizers.optimizer import HyperParameters, Optimizer, States
from paramserver.contract.optimizers.sgd import SGD

_RECORDS = (
    ADAMW,
    ADAM,
    SGD,
    LION,
    ADAGRAD,
)
OPTIMIZERS: Mapping[str, Optimizer] = {record.name: record for record in _RECORDS}


def apply(row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    """Update weight and states in place, on any device.

    Args:
        row: which optimizer, and its hyper-parameters; `find_problem` has found none.
        weight: [n] fp32.
        gradient: [n] fp32, unscaled and clipped; may be overwritten.
        states: [n] fp32 each, at least `state_kinds(row)`.
    """
    name = row.WhichOneof("optimizer")
    OPTIMIZERS[name].rule(getattr(row, name), weight, gradient, states)


def state_kinds(row: HyperParameters) -> tuple[Kind, ...]:
    """Return the states that `apply` reads and writes for such a row."""
    name = row.WhichOneof("optimizer")
    optimizer = OPTIMIZERS[name]
    return optimizer.states if optimizer.needs_states(getattr(row, name)) else ()


def find_problem(row: HyperParameters) -> str | None:
    """Return what is wrong with a row, with the name of its field; None: nothing.

    The daemon asks before it works with what comes in, a trainer before it begins a step.
    """
    name = row.WhichOneof("optimizer")
    if name is None:
        return f"hyper_parameters.optimizer is not set; known are {', '.join(OPTIMIZERS)}"
    optimizer, values = OPTIMIZERS[name], getattr(row, name)
    for field, is_good in optimizer.ranges.items():
        value = getattr(values, field)
        if not is_good(value):
            return f"{name}.{field} = {value} is out of its range"
    return optimizer.find_conflict(values)
