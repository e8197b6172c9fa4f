"""The units of a model for inference: parameters that are brought into memory and released together.

A block is a unit, as in training. Outside of the blocks, the parameters of each module are a unit of their own, so that
for example an embedding is not in memory while the blocks compute. This module owns the memory that a unit's parameters
point to. It must never decide when a unit is fetched or released, because residency.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer_client.client.store_client.types import StoredTensor
from trainer_client.errors import ConfigError
from trainer_client.inference.weights import HeldTensors, LeasePlan
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.released import release, restore
from trainer_client.training.model.unit_policy import UnitPolicy, find_units


@dataclass(slots=True, eq=False)
class WeightUnit:
    """Parameters that are fetched and released together, and the modules that need them.

    Attributes:
        name: the name of the unit's first module.
        modules: the modules whose forward needs the parameters.
        parameters: the parameters.
        plan: the leases that bring the parameters into memory.
        stays: whether the parameters stay in memory after they were fetched once.
        held: the tensors with the parameters' values while they are in memory; None: they are not in memory.
        users: the number of forwards under way that need the parameters.
        addresses: the addresses of the first bytes of the tensors in `held`.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[ModelParameter, ...]
    plan: LeasePlan
    stays: bool = False
    held: HeldTensors | None = None
    users: int = 0
    addresses: frozenset[int] = frozenset()

    def show(self, held: HeldTensors) -> None:
        """Make the unit's parameters point to the tensors in `held`, so that a forward can use them."""
        for parameter in self.parameters:
            restore(parameter.tensor)
            if parameter.shape.numel():
                parameter.tensor.data = held.tensors[parameter.fqn]
        self.addresses = frozenset(tensor.untyped_storage().data_ptr() for tensor in held.tensors.values())
        # `held` is set last. If an interruption comes before this line, some parameters may have no values yet, and the
        # unit still counts as not in memory.
        self.held = held

    def hide(self, on_use: Callable[[WeightUnit], None]) -> HeldTensors | None:
        """Take the values away from the parameters, and return the tensors that held the values.

        Args:
            on_use: called when a function of torch is about to use a parameter of the unit; it has to call `show`
                before it returns.
        """
        held, self.held, self.addresses = self.held, None, frozenset()
        # The cache of autocast may hold a copy of a parameter in a lower precision, which a later forward would use
        # although the parameter's values have changed. So the cache is cleared.
        torch.clear_autocast_cache()
        for parameter in self.parameters:
            tensor = parameter.tensor
            restore(tensor)
            if parameter.shape.numel():
                tensor.data = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device).expand(
                    parameter.shape
                )
                release(tensor, lambda _: on_use(self))
        return held


def divide(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    stored: Mapping[str, StoredTensor],
    policy: UnitPolicy,
) -> list[WeightUnit]:
    """Return the units of a model, in the model's order.

    Args:
        model: the model.
        parameters: all parameters of the model.
        stored: the stored tensors, by the parameters' names.
        policy: chooses the blocks.
    """
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for tensor in module.parameters(recurse=False):
            owners.setdefault(id(tensor), []).append((name, module))
    found: list[WeightUnit] = []
    root, *blocks = find_units(model, parameters, policy)
    of_root: dict[tuple[str, ...], list[ModelParameter]] = {}
    for parameter in root.parameters:
        of_root.setdefault(tuple(name for name, _ in owners[id(parameter.tensor)]), []).append(parameter)
    for members in of_root.values():
        holders = owners[id(members[0].tensor)]
        modules = tuple(module for _, module in holders)
        found.append(_unit(holders[0][0], modules, members, stored))
    found += [_unit(spec.fqn, (spec.module,), spec.parameters, stored) for spec in blocks if spec.parameters]
    return sorted(found, key=lambda unit: unit.parameters[0].index)


def _unit(
    name: str, modules: tuple[nn.Module, ...], parameters: Sequence[ModelParameter], stored: Mapping[str, StoredTensor]
) -> WeightUnit:
    dtypes = {parameter.fqn: parameter.tensor.dtype for parameter in parameters}
    plan = LeasePlan.of([stored[parameter.fqn] for parameter in parameters if parameter.shape.numel()], dtypes)
    return WeightUnit(name, modules, tuple(parameters), plan)


def check_fit(parameters: Sequence[ModelParameter], stored: Mapping[str, StoredTensor], where: str) -> None:
    """Check that the job's stored tensors have the names and shapes of the model's parameters.

    Args:
        where: the step and the job, for the message.

    Raises:
        ConfigError: a name or a shape differs; the message lists the first differences. Another dtype is no difference,
            because the values are cast.
    """
    wanted = {parameter.fqn: parameter for parameter in parameters if parameter.shape.numel()}
    problems = [f"{fqn} is not stored" for fqn in wanted if fqn not in stored]
    problems += [f"{fqn} is stored, and the model has no such parameter" for fqn in stored if fqn not in wanted]
    for fqn, parameter in wanted.items():
        tensor = stored.get(fqn)
        if tensor is not None and tensor.shape != tuple(parameter.shape):
            problems.append(f"{fqn} is stored as {list(tensor.shape)}, and is {list(parameter.shape)} in the model")
    if problems:
        more = f"\n... and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ConfigError(
            f"{where} has another model than this one:\n"
            + "\n".join(problems[:5])
            + more
            + "\nBuild the stored model, or name another job (paramserver.job)"
        )
