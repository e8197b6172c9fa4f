"""The hooks on the parameters of a model, which autograd calls as it finishes their gradients.

This module owns the hooks. It must never look at a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.taken_gradients import hide_gradient, show_gradient
from trainer_client.training.model.tile import TileWeight, take_whole
from trainer_client.training.model.units import Unit, UnitState
from trainer_client.training.step.gradient_group import GradientGroup
from trainer_client.training.step.gradients import Gradients

Hook: TypeAlias = Callable[[torch.Tensor], None]


class ParameterHooks:
    """The hooks on the parameters of one engine's model.

    [Note: weak hooks] torch does not show the garbage collector that a parameter refers to such a hook. If the hook
    referred to the engine, and so to the parameter, an engine that a program has forgotten would never be freed, and
    neither would its model. So torch gets a hook that only has a weak reference to this object, and the number of the
    real hook.
    """

    def __init__(self, units: Sequence[Unit], gradients: Gradients) -> None:
        self._units = units
        self._gradients = gradients
        self._handles: list[RemovableHandle] = []
        self._hooks: list[Hook] = []
        self._registered: list[tuple[torch.Tensor, int]] = []
        # The parameters whose gradients the engine has taken over in this step, so that reading their `.grad` raises an
        # error.
        self._hidden: list[nn.Parameter] = []

    def install(self, act: Callable[[Unit, GradientGroup, int, torch.Tensor], None]) -> None:
        """Register a hook on each parameter of a trainable group, also on one that is frozen at the moment.

        Args:
            act: called with the unit of a parameter, its group, its slot in the group, and the parameter, whose `.grad`
                is finished.
        """
        # Maps the index of each parameter that is cut into tiles to the whole parameter and its tiles.
        tiled: dict[int, tuple[ModelParameter, list[TileWeight]]] = {}
        for unit in self._units:
            for gradient in self._gradients.of_unit(unit):
                for slot, parameter in enumerate(gradient.flat_group.parameters):
                    hook = partial(act, unit, gradient, slot)
                    if unit.tile is None:
                        self._register(parameter.tensor, hook)
                    else:
                        unit.tile.on_gradient = hook
                        tiled.setdefault(parameter.index, (parameter.whole, []))[1].append(unit.tile)
        for whole, tiles in tiled.values():
            self._register(whole.tensor, partial(take_whole, whole.fqn, tiles))

    def keep_last(self) -> None:
        """Move the engine's hooks behind those that the script has registered later, so that autograd calls them last.

        The script's hooks look at `.grad`, and the engine's hooks set `.grad` to None.
        """
        for parameter, number in self._registered:
            hooks = parameter._post_accumulate_grad_hooks
            if hooks is not None and next(reversed(hooks)) != number:
                # Removing and inserting the hook again puts it last. `OrderedDict.move_to_end` would not change the
                # order in which autograd calls the hooks of the dict.
                hooks[number] = hooks.pop(number)

    def hide_gradients(self) -> None:
        """Make the use of `.grad` an error for parameters whose gradients the engine has taken over in this step."""
        for unit in self._units:
            for gradient in self._gradients.of_unit(unit):
                for slot in gradient.present if unit.tile is None else ():
                    parameter = gradient.flat_group.parameters[slot]
                    is_released = unit.state is not UnitState.RESIDENT
                    hide_gradient(parameter.tensor, parameter.fqn, is_released=is_released)
                    self._hidden.append(parameter.tensor)

    def show_gradients(self) -> None:
        """Let the script use `.grad` again, after `hide_gradients`. Idempotent."""
        while self._hidden:
            show_gradient(self._hidden.pop())

    def _register(self, parameter: torch.Tensor, hook: Hook) -> None:
        """Register `hook` on a parameter under a number, so that torch does not refer to it; see [Note: weak hooks]."""
        self._hooks.append(hook)
        self._handles.append(_register(parameter, partial(_call, weakref.ref(self), len(self._hooks) - 1)))
        self._registered.append((parameter, self._handles[-1].id))

    def call(self, number: int, parameter: torch.Tensor) -> None:
        """Call the hook that was registered under this number, because the parameter's gradient is finished."""
        self._hooks[number](parameter)

    def remove(self) -> None:
        """Remove the engine's hooks from all parameters. Idempotent."""
        self.show_gradients()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._registered.clear()
        self._hooks.clear()
        for unit in self._units:
            if unit.tile is not None:
                unit.tile.on_gradient = None


def _call(reference: weakref.ref[ParameterHooks], number: int, parameter: torch.Tensor) -> None:
    hooks = reference()
    if hooks is not None:
        hooks.call(number, parameter)


def _register(parameter: torch.Tensor, hook: Hook) -> RemovableHandle:
    """Register a hook that torch calls when the gradient is finished. It stays when the parameter is frozen."""
    is_trained = parameter.requires_grad
    # While a parameter in tiles is released, its tensor subclass refuses hooks, because autograd computes no gradient
    # for it in that state. So the subclass is disabled while the engine registers its own hook.
    with torch._C.DisableTorchFunctionSubclass():
        # torch accepts a hook only on a parameter that requires a gradient, and keeps the hook when the parameter is
        # frozen. So the parameter requires a gradient while the hook is registered.
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(is_trained)
    return handle
