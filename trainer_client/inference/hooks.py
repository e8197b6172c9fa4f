"""The hooks that bring a unit into memory before the forward of its module, and release it afterwards.

This module owns the handles of the hooks, and the list of the forwards under way. After a forward that failed, it must
release the units that the forward has entered.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from trainer_client.errors import SessionEndedError
from trainer_client.inference.residency import WeightResidency
from trainer_client.inference.units import WeightUnit
from trainer_client.training.model.transforms import is_transformed
from trainer_client.training.step.tensor_tree import TensorTree


@dataclasses.dataclass(slots=True, eq=False)
class _HookedForward:
    """The record of a forward under way of a module with hooks: the units to release when the forward ends.

    Attributes:
        module: the module.
        entered: the units that the hooks have brought into memory for this forward so far.
        has_returned: whether the forward has returned without an error.
    """

    module: nn.Module
    entered: list[WeightUnit] = dataclasses.field(default_factory=list)
    has_returned: bool = False


class _OfThread(threading.local):
    """The list, for each thread, of its forwards under way of modules with hooks, the outermost forward first."""

    def __init__(self) -> None:
        self.forwards: list[_HookedForward] = []


class InferenceHooks:
    """The hooks on one model's modules, which fetch a unit before a forward needs it, and release it afterwards.

    Several threads may call the model at the same time.
    """

    def __init__(self, model: nn.Module, units: list[WeightUnit], residency: WeightResidency) -> None:
        self._model = model
        self._residency = residency
        self._handles: list[RemovableHandle] = []
        self._of_thread = _OfThread()
        of_module: dict[nn.Module, list[WeightUnit]] = {model: []}
        for unit in units:
            for module in unit.modules:
                of_module.setdefault(module, []).append(unit)
        for module, needed in of_module.items():
            self._install(module, needed)

    def _install(self, module: nn.Module, units: list[WeightUnit]) -> None:
        def before(module: nn.Module, args: Any) -> None:
            forwards = self._of_thread.forwards
            if module is self._model and forwards:
                # The outermost forward begins, and earlier ones seem to be under way. torch calls no hook when a
                # KeyboardInterrupt leaves a module, so these forwards were interrupted, and their units are released
                # now.
                self._give_up(forwards)
            if not forwards:
                self._residency.begin_forward()
            mine = _HookedForward(module)
            forwards.append(mine)
            for unit in units:
                self._residency.enter(unit)
                mine.entered.append(unit)

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            if (mine := self._running(module)) is not None:
                mine.has_returned = True

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if (mine := self._running(module)) is None:
                # This forward is not in the list of forwards, because another hook has failed before `before` added it.
                # So the forward has no units to release.
                return output
            forwards = self._of_thread.forwards
            forwards.pop()
            # If the module's forward has already raised an error, a second error from this hook would only make torch
            # print a warning, so the second error is suppressed.
            with nullcontext() if mine.has_returned else suppress(SessionEndedError):
                try:
                    output = self._keep(output, is_outermost=not forwards)
                finally:
                    self._end(mine, is_outermost=not forwards)
            return output

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(returned))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _running(self, module: nn.Module) -> _HookedForward | None:
        """Return the innermost forward of this thread if it is one of `module`, else None."""
        forwards = self._of_thread.forwards
        return forwards[-1] if forwards and forwards[-1].module is module else None

    def _end(self, forward: _HookedForward, *, is_outermost: bool) -> None:
        """Release the units of a forward that has ended, unless they stay in memory. It can raise SessionEndedError."""
        try:
            self._residency.leave_all(forward.entered)
        finally:
            if is_outermost:
                self._residency.end_forward()

    def _give_up(self, forwards: list[_HookedForward]) -> None:
        """Release the units of interrupted forwards, for which torch has called no hook, and clear `forwards`."""
        entered = [unit for forward in forwards for unit in forward.entered]
        forwards.clear()
        with suppress(SessionEndedError):
            self._residency.leave_all(entered)

    def _keep(self, output: Any, *, is_outermost: bool) -> Any:
        """Return the output with copies in place of views of parameters whose memory will be released.

        Within a forward of the whole model, views of units that stay in memory remain valid. They are copied only for
        the caller of the whole model, because such units are released when the engine is closed or the session ends.
        """
        with_staying = is_outermost and not is_transformed()
        if not with_staying and not self._residency.streams:
            return output
        found = [
            tensor
            for tensor in TensorTree.of(output).tensors
            if self._residency.owns(tensor, with_staying=with_staying)
        ]
        return _replaced(output, {id(tensor): tensor.detach().clone() for tensor in found}) if found else output

    def remove(self) -> None:
        """Remove all hooks. A repeated call has no effect."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _replaced(output: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a forward's output with the copies in place of the tensors whose `id` is a key of `copies`."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return copies.get(id(leaf), leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        other = copy.copy(leaf)
        # `hasattr` leaves out fields that this object of a dataclass lacks. `object.__setattr__` is used because a
        # frozen dataclass refuses a plain assignment.
        for name in (field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)):
            object.__setattr__(other, name, tree_map(replaced, getattr(leaf, name)))
        return other

    return tree_map(replaced, output)
