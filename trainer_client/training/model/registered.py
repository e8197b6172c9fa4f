"""External parameters of modules, as the user has registered them before `initialize`.

An external parameter of a module is a parameter of another module that the module's forward uses.

This module owns the list on each module, and DeepSpeed's method that reads it. It must never gather anything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn

# The name of the attribute in which a module keeps the list of parameters that the user has registered for the module
# as external parameters.
_EXTERNAL = "_paramserver_external"


def registered_for(module: nn.Module) -> list[nn.Parameter]:
    """Return the list of parameters that are registered for a module. The caller may change the list."""
    known: list[nn.Parameter] = vars(module).setdefault(_EXTERNAL, [])
    return known


def external_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield each module of a model with each parameter that was registered for it before `initialize`."""
    for module in model.modules():
        for parameter in getattr(module, _EXTERNAL, ()):
            yield module, parameter


def show_external(model: nn.Module) -> None:
    """Give each module of a model DeepSpeed's method `ds_external_parameters`.

    The method is a partial object and no bound method, because a module with a bound method of its own cannot be
    pickled.
    """
    for module in model.modules():
        vars(module)["ds_external_parameters"] = functools.partial(_numbered, module)


def _numbered(module: nn.Module) -> Iterator[tuple[int, nn.Parameter]]:
    """Yield the parameters that are registered for a module, each with the number that DeepSpeed gives it (`ds_id`)."""
    for parameter in getattr(module, _EXTERNAL, ()):
        yield id(parameter), parameter
