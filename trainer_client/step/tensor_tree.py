"""The tensors in a module's inputs and outputs. Pure functions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorTree:
    """The tensors in a value.

    Attributes:
        tensors: all tensors that were found, in containers that torch's pytrees know and in dataclasses, at any depth.
        hides_some: whether the value holds objects of other types, which may hold more tensors.
    """

    tensors: tuple[torch.Tensor, ...]
    hides_some: bool

    @classmethod
    def of(cls, values: Any) -> TensorTree:
        """Return the tensors in `values`."""
        leaves = list(_leaves(values))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        hides_some = any(not isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves)
        return cls(tensors=tensors, hides_some=hides_some)

    def requiring_grad(self) -> list[torch.Tensor]:
        """Return the tensors that require a gradient."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]


def _leaves(values: Any) -> Iterator[Any]:
    """Yield the leaves of a pytree, and those of the dataclasses in it."""
    for leaf in tree_leaves(values):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            # The fields are read one by one, because a dataclass may be built without all of its fields.
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None))
        else:
            yield leaf
