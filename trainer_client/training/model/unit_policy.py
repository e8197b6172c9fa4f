"""Policies that choose which modules of a model are units. They are pure functions of the model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from trainer_client.config.paramserver import UnitsSection
from trainer_client.errors import ConfigError
from trainer_client.training.model.leaves import is_leaf
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.tile import TileWeight

UnitPolicy = Callable[[nn.Module], Iterable[nn.Module]]
"""A function that returns the modules of a model that shall be units.

Each of these modules must have a forward, and none may be within another one.
"""

# Containers cannot be units, because they have no forward that could be hooked.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """A unit and the parameters that belong to it. It is in use while `module`, or one of `other_uses`, is called.

    Attributes:
        fqn: name of the unit's module; "" is the root.
        module: the unit's module.
        parameters: the unit's parameters, in the model's order.
        tile: the tile that the unit is; None if the unit is a module of the model.
        other_uses: the modules of the other uses of a tile of a tied weight; empty for all other units.
    """

    fqn: str
    module: nn.Module
    parameters: tuple[ModelParameter, ...]
    tile: TileWeight | None = None
    other_uses: tuple[nn.Module, ...] = ()


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of each ModuleList whose elements are of one class: the default policy.

    A ModuleList within a yielded element is left out, because the element is gathered as a whole.
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList) and _is_uniform(child):
            yield from dict.fromkeys(child)
        else:
            yield from repeated_blocks(child)


def modules_of_classes(names: Sequence[str]) -> UnitPolicy:
    """Return a policy that chooses the outermost modules whose class has one of the names.

    The policy raises ConfigError if the model has no module of one of the classes.
    """

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).__name__ in names:
                yield child
            else:
                yield from outermost(child)

    def policy(model: nn.Module) -> Iterable[nn.Module]:
        present = sorted({type(module).__name__ for module in model.modules() if module is not model})
        for name in names:
            if name not in present:
                near = difflib.get_close_matches(name, present, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(present)}"
                raise ConfigError(f"paramserver.units.classes: no module of the model is a {name!r}; {hint}")
        return outermost(model)

    return policy


def modules_up_to(max_parameters: int) -> UnitPolicy:
    """Return a policy that chooses the largest modules of at most `max_parameters` elements.

    It also chooses modules with more elements that have no children, because such modules cannot be divided.
    """

    def policy(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            elements = sum(parameter.numel() for parameter in child.parameters())
            small = elements <= max_parameters and not isinstance(child, _CONTAINERS)
            if elements and (small or next(child.children(), None) is None):
                yield child
            else:
                yield from policy(child)

    return policy


def choose_policy(section: UnitsSection, policy: UnitPolicy | None) -> UnitPolicy:
    """Return `policy`, the argument of `initialize(unit_policy=...)`, or the policy that the config asks for.

    Raises:
        ConfigError: both are given.
    """
    if policy is not None:
        if section.classes or section.max_parameters:
            raise ConfigError("paramserver.units and initialize(unit_policy=...) both choose the units: pass one")
        return policy
    if section.classes:
        return modules_of_classes(section.classes)
    return modules_up_to(section.max_parameters) if section.max_parameters else repeated_blocks


def find_units(
    model: nn.Module, parameters: Sequence[ModelParameter], policy: UnitPolicy = repeated_blocks
) -> list[UnitSpec]:
    """Return the root unit and then those that `policy` chooses, in the model's order.

    A module that is marked as a leaf (see leaves.py) is a unit, in place of the units within it that `policy` chooses.
    A mark within a unit changes nothing, because the unit is gathered as a whole anyway. If a marked module is a
    container without a forward, such as a ModuleList, the modules in it become units.

    A parameter that only one unit holds belongs to that unit. All other parameters belong to the root: parameters
    outside of the units, and parameters that are tied between units or between a unit and the rest of the model.

    Raises:
        ConfigError: a module that the policy chose cannot be a unit.
    """
    chosen = _with_leaves(model, set(policy(model)))
    names = _names_of_units(model, chosen)
    # A module that the model has under several names is one unit, which gets the first of these names.
    units: dict[nn.Module, str] = {}
    for name, module in names.items():
        units.setdefault(module, name)
    holders: dict[int, set[str]] = {}
    for fqn, tensor in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(tensor), set()).add(_unit_of(fqn, names, units))
    members: dict[str, list[ModelParameter]] = {fqn: [] for fqn in ("", *units.values())}
    for parameter in parameters:
        held_by = holders[id(parameter.tensor)]
        members[next(iter(held_by)) if len(held_by) == 1 else ""].append(parameter)
    root = UnitSpec(fqn="", module=model, parameters=tuple(members[""]))
    return [root, *(UnitSpec(fqn=f, module=m, parameters=tuple(members[f])) for m, f in units.items())]


def _with_leaves(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """Add the outermost leaves that are not within a chosen module, and leave out chosen modules within a leaf."""
    if is_leaf(model):
        # If the model itself is marked as a leaf, it has no units but the root unit, so all its parameters are gathered
        # together.
        return set()

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if is_leaf(child) and next(child.parameters(), None) is not None:
                yield from _with_forward(child)
            elif child not in chosen:
                yield from outermost(child)

    leaves = set(outermost(model))
    replaced = {module for leaf in leaves for module in leaf.modules()}
    return (chosen - replaced) | leaves


def _with_forward(leaf: nn.Module) -> Iterator[nn.Module]:
    """Yield `leaf`, or the modules in it if it is a container, because a container has no forward for hooks."""
    if isinstance(leaf, _CONTAINERS):
        for child in leaf.children():
            yield from _with_forward(child)
    elif next(leaf.parameters(), None) is not None:
        yield leaf


def _names_of_units(model: nn.Module, chosen: set[nn.Module]) -> dict[str, nn.Module]:
    """Return all names of the chosen modules, in the model's order; a module that the model holds twice has two names.

    Raises:
        ConfigError: a module cannot be a unit.
    """
    names: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if module not in chosen:
            continue
        if module is model or isinstance(module, _CONTAINERS):
            what = "the model itself" if module is model else f"{fqn}, a {type(module).__name__} without a forward,"
            raise ConfigError(f"{what} cannot be a unit: choose modules within it")
        if outer := next((name for name in _ancestors(fqn) if name in names), None):
            raise ConfigError(f"{fqn} cannot be a unit within the unit {outer}: choose one of them")
        names[fqn] = module
    if strangers := chosen - set(names.values()):
        raise ConfigError(f"a {type(strangers.pop()).__name__} cannot be a unit: it is not a module of the model")
    return names


def _unit_of(parameter: str, names: dict[str, nn.Module], units: dict[nn.Module, str]) -> str:
    """Return the name of the outermost unit around a parameter, or "" (the root) if no unit is around it.

    A module with several names is a unit under its first name.
    """
    return next((units[names[name]] for name in _ancestors(parameter) if name in names), "")


def _ancestors(fqn: str) -> Iterator[str]:
    """Yield the names of the modules around `fqn`, the outermost first."""
    for index, character in enumerate(fqn):
        if character == ".":
            yield fqn[:index]


def _is_uniform(modules: nn.ModuleList) -> bool:
    """Return whether all elements are of one class that is no container, and have parameters."""
    classes = {type(module) for module in modules}
    return (
        len(classes) == 1
        and not issubclass(next(iter(classes)), _CONTAINERS)
        and all(next(module.parameters(), None) is not None for module in modules)
    )
