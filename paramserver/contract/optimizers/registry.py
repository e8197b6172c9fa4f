"""The optimizers that the store runs, and the checks of an optimizer's hyper-parameters.

To add an optimizer, add a message to the contract's HyperParameters, and modules of its name with a RECORD to this
folder and to trainer_client/optimizers.

The rules call torch's fused kernels directly and not the functions of torch.optim. The bookkeeping of torch.optim takes
longer than the kernel does for ten thousand elements, and even more if the processor's cache is full of states.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from paramserver.contract.kinds import Kind
from paramserver.contract.optimizers.optimizer import HyperParameters, Optimizer, States, Tensors


def _record(name: str) -> Optimizer:
    found: Optimizer = import_module(f"paramserver.contract.optimizers.{name}").RECORD
    return found


# The records, in the order of the contract. Each is RECORD of the module that has the name of the optimizer's field.
OPTIMIZERS: Mapping[str, Optimizer] = {
    field.name: _record(field.name) for field in HyperParameters.DESCRIPTOR.oneofs_by_name["optimizer"].fields
}


def apply(row: HyperParameters, weights: Tensors, gradients: Tensors, states: States) -> None:
    """Update weights and states in place, on any device.

    Args:
        row: an optimizer and its hyper-parameters, in which `find_problem` found no problem.
        weights: at least one tensor, each [n] fp32.
        gradients: of each weight, [n] fp32, unscaled and clipped; may be overwritten.
        states: of each weight, [n] fp32 each, at least `state_kinds(row)`.
    """
    name = row.WhichOneof("optimizer")
    OPTIMIZERS[name].rule(getattr(row, name), weights, gradients, states)


def state_kinds(row: HyperParameters) -> tuple[Kind, ...]:
    """Return the kinds of states, such as exp_avg, that `apply` reads and writes with these hyper-parameters."""
    name = row.WhichOneof("optimizer")
    optimizer = OPTIMIZERS[name]
    return optimizer.states if optimizer.needs_states(getattr(row, name)) else ()


def find_problem(row: HyperParameters) -> str | None:
    """Return which hyper-parameter of `row` is wrong and why, or None if all of them are valid.

    The daemon checks the hyper-parameters that it receives, and a trainer checks its own before it begins a step.
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
