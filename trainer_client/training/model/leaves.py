"""The leaves of a model: modules whose parameters the user wants gathered together, as DeepSpeed's stage 3 does.

This module owns the mark of a leaf, and the ways in which leaves are chosen: by class, by name, or by the end of the
name. It must never choose units: unit_policy.py makes units of the leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from trainer_client import comm
from trainer_client.config.zero import ZeroSection

log = logging.getLogger(__name__)

ModuleClass: TypeAlias = type[nn.Module] | str
"""A class of modules, or its name, with or without the name of its Python module in front."""

# This attribute of a module marks the module as a leaf. It has DeepSpeed's name, because Accelerate's users read it.
_LEAF = "_z3_leaf"


def mark_leaf(module: nn.Module, flag: bool) -> None:
    """Mark a module as a leaf, or take the mark away. `find_units` makes each outermost leaf a unit, or a part of one.

    The mark is on the module itself, because DeepSpeed's functions that set it are given the module and no engine.
    """
    if flag:
        setattr(module, _LEAF, True)
    elif is_leaf(module):
        delattr(module, _LEAF)


def is_leaf(module: nn.Module) -> bool:
    """Return whether the module itself is marked as a leaf."""
    return getattr(module, _LEAF, False)


def find_by_class(model: nn.Module, classes: Sequence[ModuleClass]) -> list[nn.Module]:
    """Return the modules of the model that are of one of the classes."""
    return [module for module in model.modules() if any(_is_of(module, wanted) for wanted in classes)]


def find_by_name(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    """Return the modules whose name fits one of the wanted names, and the wanted names that no module fits.

    Args:
        fits: called with a name of `model.named_modules()` and a wanted name; returns whether the name fits.
    """
    names = dict(model.named_modules())
    missing = [part for part in wanted if not any(fits(name, part) for name in names)]
    return [module for name, module in names.items() if any(fits(name, part) for part in wanted)], missing


def mark_configured_leaves(model: nn.Module, section: ZeroSection) -> None:
    """Mark the modules that `zero_optimization.leaf_module` of the config names, at stage 3 only."""
    wanted = section.leaf_module
    if section.stage < 3:
        return
    found = find_by_class(model, wanted.classes)
    by_name, missing = find_by_name(model, wanted.names, str.__eq__)
    by_suffix, missing_suffixes = find_by_name(model, wanted.name_suffixes, str.endswith)
    for module in (*found, *by_name, *by_suffix):
        mark_leaf(module, True)
    if wanted.classes and not found:
        missing = [*wanted.classes, *missing]
    if (missing or missing_suffixes) and comm.get_rank() == 0:
        log.warning(
            "zero_optimization.leaf_module names what the model does not have: %s",
            ", ".join(repr(name) for name in (*missing, *missing_suffixes)),
        )


def _is_of(module: nn.Module, wanted: ModuleClass) -> bool:
    if isinstance(wanted, str):
        cls = type(module)
        return wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return isinstance(module, wanted)
