"""The tensors in a module's inputs and outputs, and in its attributes. Pure functions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)

# The attributes that every module has: its parameters, buffers, hooks and others. None of them is a result of a
# forward, so they are not searched for tensors.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))

_MAY_HAVE_TENSORS = (torch.Tensor, list, tuple, dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorTree:
    """The tensors that were found in a module's inputs or outputs, so that the hooks can watch their gradients.

    Attributes:
        tensors: all tensors that were found, in containers that torch's pytrees know and in dataclasses, at any depth.
        hides_some: whether the value holds objects of other types, which may hold more tensors.
    """

    tensors: tuple[torch.Tensor, ...]
    hides_some: bool

    @classmethod
    def of(cls, values: Any) -> TensorTree:
        """Return the tensors in `values`, at any depth of containers and dataclasses."""
        leaves = list(_leaves(values))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        hides_some = any(not isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves)
        return cls(tensors=tensors, hides_some=hides_some)

    def requiring_grad(self) -> list[torch.Tensor]:
        """Return those of the tensors that require a gradient, in the order of `tensors`."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]


def computed_attributes(modules: Iterable[nn.Module], since: int) -> list[torch.Tensor]:
    """Return the attributes of modules that are tensors made by autograd's node number `since` or a later one.

    An attribute may also be a list, a tuple or a dict whose last elements are such tensors.
    """
    is_recent = partial(_is_made_by, since)
    return [
        tensor
        for module in modules
        for name, attribute in vars(module).items()
        if name not in _OF_ALL_MODULES and isinstance(attribute, _MAY_HAVE_TENSORS)
        for tensor in takewhile(is_recent, reversed(_values(attribute)))
    ]


def _values(attribute: Any) -> Sequence[Any]:
    """Return the values in a module's attribute that may be tensors: its elements, or the attribute itself."""
    if isinstance(attribute, dict):
        return tuple(attribute.values())
    return (attribute,) if isinstance(attribute, torch.Tensor) else attribute


def _is_made_by(since: int, value: object) -> bool:
    """Return whether a value is a tensor that a node with the number `since` or a later one has made."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None and value.grad_fn._sequence_nr() >= since


def _leaves(values: Any) -> Iterator[Any]:
    """Yield the leaves of a pytree, and those of the dataclasses in it."""
    for leaf in tree_leaves(values):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            # The fields of a dataclass are read one by one, and missing ones are skipped, because a dataclass may be
            # built without all of its fields.
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name, None))
        else:
            yield leaf
