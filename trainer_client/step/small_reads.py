"""Reads of small parameters outside of the model's forward, as DeepSpeed's stage 3 allows them.

DeepSpeed keeps parameters of up to `stage3_param_persistence_threshold` elements whole, and at most
`stage3_model_persistence_threshold` elements of them, so that scripts read them as `model.scale.item()`. Here such a
parameter's unit is gathered for the one function of torch that reads it. Nothing stays gathered for that, so steps cost
what they cost without, and a read sees the last step.

This module owns which parameters may be read so, and what a read may return. It must never let a change be lost: what
would change the gathered copy, or return memory of it, is refused as for a large parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer_client.errors import ReleasedParameterError
from trainer_client.model.parameters import ModelParameter
from trainer_client.model.transforms import outside_of_transforms
from trainer_client.model.units import Unit

# The types that a read may return, besides new tensors. An array of numpy would have the memory of the copy.
_VALUES = (bool, int, float, complex, str, type(None))


class SmallReads:
    """The reads of one engine.

    Args:
        parameters: all parameters, in the model's order.
        largest: the most elements of a parameter that may be read.
        total: the most elements of all such parameters together; those that come first count first.
    """

    def __init__(self, parameters: Sequence[ModelParameter], *, largest: int, total: int) -> None:
        self._small: set[int] = set()
        for parameter in parameters:
            numel = parameter.shape.numel()
            if numel <= largest and numel <= total:
                total -= numel
                self._small.add(id(parameter.tensor))

    def allows(self, parameter: ModelParameter, function: str) -> bool:
        """Return whether a function may be given the parameter's values outside of a forward."""
        # A change of `parameter.data` counts for no version of the tensor, so it would be lost unseen.
        return id(parameter.tensor) in self._small and function != "data"

    def end(self) -> None:
        """Allow no read any more, because the engine ends."""
        self._small.clear()

    @contextmanager
    def reading(self, unit: Unit, parameter: ModelParameter, function: str) -> Iterator[Callable[[Any], None]]:
        """Have the unit gathered within the context, and yield the check of the function's result.

        The check raises ReleasedParameterError if the function has changed the parameter, or if its result has the
        parameter's memory or needs it for a backward pass.
        """
        with outside_of_transforms():
            unit.hold()
        try:
            tensor = parameter.tensor
            version, address = tensor._version, tensor.untyped_storage().data_ptr()

            def check(result: Any) -> None:
                if tensor._version != version or not all(_is_new(leaf, address) for leaf in tree_leaves(result)):
                    raise ReleasedParameterError(parameter.fqn, function)

            yield check
        finally:
            unit.release_hold()


def _is_new(leaf: Any, address: int) -> bool:
    """Return whether a part of a result is a value, or a tensor that needs no memory at `address`."""
    if isinstance(leaf, torch.Tensor):
        return not leaf.requires_grad and leaf.untyped_storage().data_ptr() != address
    return isinstance(leaf, _VALUES)
