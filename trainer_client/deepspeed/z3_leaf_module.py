"""DeepSpeed's leaf modules of stage 3, whose parameters are gathered together when the module runs.

Here a leaf module is a unit (see training/model/leaves.py). `trainer_client.initialize` reads the marks, so a mark that
is made later has no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from trainer_client.training.model.leaves import ModuleClass, find_by_class, find_by_name, is_leaf, mark_leaf
from trainer_client.training.model.owners import owner_of

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

log = logging.getLogger(__name__)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module is marked as a leaf."""
    return is_leaf(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the model that are marked as leaves, which may be the model itself."""
    return [module for module in model.modules() if is_leaf(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module as a leaf if `flag`, or take the mark away. After `initialize` the call only logs a warning."""
    if any(owner_of(parameter) is not None for parameter in model.parameters()):
        log.warning(
            "a %s is marked as a leaf module after initialize(), when the units are chosen: mark it before",
            type(model).__name__,
        )
    mark_leaf(model, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ModuleClass], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of the given classes as leaves, and return these modules.

    Raises:
        ValueError: the model has no module of these classes, and `raise_if_not_found` is true.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ModuleClass], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark of a leaf away from all modules of the given classes, and return these modules.

    Raises:
        ValueError: the model has no module of these classes, and `raise_if_not_found` is true.
    """
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `model.named_modules()`. Return the modules, and the names that none has.

    Raises:
        ValueError: no module has one of the names, and `raise_if_not_found` is true.
    """
    return _mark_names(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names. Return the modules, and the ends with which no name ends.

    Raises:
        ValueError: no name ends with one of the ends, and `raise_if_not_found` is true.
    """
    return _mark_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _mark_classes(
    model: nn.Module, classes: Sequence[ModuleClass], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = find_by_class(model, classes)
    if not found and raise_if_not_found:
        present = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise ValueError(f"no module of the model is of a class in {list(classes)}: it has {present}")
    _mark(found, flag)
    return found


def _mark_names(
    model: nn.Module,
    wanted: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    found, missing = find_by_name(model, wanted, fits)
    if missing and raise_if_not_found:
        raise ValueError(f"no module of the model is called {missing}: see model.named_modules()")
    _mark(found, flag)
    return found, missing


def _mark(modules: Iterable[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)
