"""A hook that is called when all gradients of several tensors have come in a backward pass.

It does what `torch.autograd.graph.register_multi_grad_hook` does, also where `torch.autograd.grad` asks for the
gradient of one of the tensors that is a leaf, such as the input of the first block of a model. For such a leaf, torch's
own hook raises an error in the middle of the pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle


class AllGradientsHook:
    """Calls a function when all gradients that a backward pass computes of several tensors have come."""

    def __init__(self, tensors: Sequence[torch.Tensor], act: Callable[[], bool]) -> None:
        """Call `act` in each pass that computes a gradient of `tensors`, which all require one, until it returns True.

        With several tensors this object and their graph refer to each other, so a graph whose backward does not come is
        freed by `remove` only, or by Python's garbage collector. One tensor needs no reference to its graph.
        """
        self._nodes = [get_gradient_edge(tensor).node for tensor in tensors] if len(tensors) > 1 else []
        self._act = act
        # For each backward pass, by its number: the number of gradients that autograd has yet to compute. The lock
        # protects the dict, because several threads of autograd may call `_note` at the same time.
        self._missing: dict[int, int] = {}
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = [tensor.register_hook(self._note) for tensor in tensors]

    def remove(self) -> None:
        """Remove the hooks from the tensors, so that no later pass calls the function. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _note(self, _: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()
        with self._lock:
            if number not in self._missing:
                self._missing[number] = sum(map(_will_be_executed, self._nodes)) or 1
            self._missing[number] -= 1
            if self._missing[number]:
                return
            del self._missing[number]
        if self._act():
            self.remove()


def is_computed(tensor: torch.Tensor) -> bool:
    """Return whether the backward pass under way computes the gradient of a tensor, now or later."""
    return _will_be_executed(get_gradient_edge(tensor).node)


def _will_be_executed(node: Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch raises RuntimeError for a leaf whose gradient `torch.autograd.grad` returns, and for no other tensor. So
        # autograd computes the gradient of this tensor.
        return True
