"""The hooks that bring a unit into memory before the forward of its module, and release it afterwards.

This module owns the handles of the hooks. It must never leave a unit in use after a forward that failed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from trainer_client.inference.residency import Residency
from trainer_client.inference.units import WeightUnit
from trainer_client.step.tensor_tree import TensorTree


class InferenceHooks:
    """The hooks on the modules of one model."""

    def __init__(self, model: nn.Module, units: list[WeightUnit], residency: Residency) -> None:
        self._model = model
        self._residency = residency
        self._handles: list[RemovableHandle] = []
        # The number of forwards under way, counting only modules with hooks.
        self._depth = 0
        of_module: dict[nn.Module, list[WeightUnit]] = {model: []}
        for unit in units:
            for module in unit.modules:
                of_module.setdefault(module, []).append(unit)
        for module, needed in of_module.items():
            self._install(module, needed)

    def _install(self, module: nn.Module, units: list[WeightUnit]) -> None:
        # Each call of the module has its own entry, because a module may be called within its own forward.
        entered: list[list[WeightUnit]] = []

        def before(module: nn.Module, args: Any) -> None:
            mine: list[WeightUnit] = []
            entered.append(mine)
            self._depth += 1
            for unit in units:
                self._residency.enter(unit)
                mine.append(unit)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not entered:
                # The forward has ended before the hook above was called, because another hook has failed.
                return output
            mine = entered.pop()
            self._depth -= 1
            kept = self._keep(output) if mine or not self._depth else output
            try:
                for unit in mine:
                    self._residency.leave(unit)
            finally:
                if not self._depth:
                    self._residency.return_borrowed()
            return kept

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _keep(self, output: Any) -> Any:
        """Return the output with copies in place of views of parameters that are released next."""
        found = [tensor for tensor in TensorTree.of(output).tensors if self._residency.owns(tensor)]
        if not found:
            return output
        copies = {id(tensor): tensor.detach().clone() for tensor in found}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return copies.get(id(tensor), tensor)

        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            changed = {
                f.name: copied(v) for f in dataclasses.fields(output) if torch.is_tensor(v := getattr(output, f.name))
            }
            return dataclasses.replace(output, **changed)
        return tree_map_only(torch.Tensor, copied, output)

    def remove(self) -> None:
        """Remove all hooks. A repeated call has no effect."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
