"""Which modules of a model are units. Pure functions of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from trainer_client.parameters import ModelParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    fqn: str  # "" is the root
    module: nn.Module
    parameters: tuple[ModelParameter, ...]


def find_units(model: nn.Module, parameters: Sequence[ModelParameter]) -> list[UnitSpec]:
    """The root unit, then the model's blocks in its order.

    The elements of the outermost ModuleLists whose elements are of one class are units; everything else belongs to the
    root, and so do parameters that are reachable from two units.
    """
    blocks = dict(_blocks(model))
    holders: dict[int, set[str]] = {}
    for fqn, block in blocks.items():
        for tensor in block.parameters():
            holders.setdefault(id(tensor), set()).add(fqn)
    # A tied parameter that the model also holds outside of the block is in use beyond the block's forward.
    outside: set[int] = set()
    for fqn, tensor in model.named_parameters(remove_duplicate=False):
        if not any(fqn.startswith(f"{block}.") for block in blocks):
            outside.add(id(tensor))
    members: dict[str, list[ModelParameter]] = {fqn: [] for fqn in ("", *blocks)}
    for parameter in parameters:
        held_by = holders.get(id(parameter.tensor), set())
        own = len(held_by) == 1 and id(parameter.tensor) not in outside
        members[next(iter(held_by)) if own else ""].append(parameter)
    root = UnitSpec(fqn="", module=model, parameters=tuple(members[""]))
    return [
        root,
        *(UnitSpec(fqn=fqn, module=block, parameters=tuple(members[fqn])) for fqn, block in blocks.items()),
    ]


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and _is_uniform(child):
            for index, element in enumerate(child):
                yield f"{fqn}.{index}", element
        else:
            yield from _blocks(child, f"{fqn}.")


def _is_uniform(modules: nn.ModuleList) -> bool:
    """Whether the elements are blocks of one kind. Containers have no forward of their own and cannot be hooked."""
    classes = {type(module) for module in modules}
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return (
        len(classes) == 1
        and not issubclass(next(iter(classes)), containers)
        and all(next(module.parameters(), None) is not None for module in modules)
    )
