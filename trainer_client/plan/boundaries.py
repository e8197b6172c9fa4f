"""The boundaries of activation checkpoints in a rehearsed step, which leave the device as they do in a real one.

The rules of step/boundary.py decide what a boundary is and which ones leave. This module owns the assumption about how
many of the newest stay, which a real step measures. It must never call a store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from trainer_client.config.training_config import TrainingConfig
from trainer_client.step.boundary import Key, Newest, Saved, is_saved_by_checkpoint, key_of, may_leave
from trainer_client.step.recall_depth import MOST_STAYING


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRule:
    """The keys that decide which boundaries leave the device.

    Attributes:
        smallest_bytes: boundaries with fewer bytes stay.
        kept_bytes: the bytes of the newest boundaries that stay.
    """

    smallest_bytes: int
    kept_bytes: int

    @classmethod
    def of(cls, config: TrainingConfig) -> OffloadRule | None:
        """Return the rule of a config; None if all boundaries stay on the device."""
        section = config.paramserver.activations
        if not config.offloads_activations:
            return None
        return cls(smallest_bytes=int(section.smallest), kept_bytes=int(section.kept))


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Boundary:
    """A boundary of the rehearsal.

    Attributes:
        key: identifies its bytes when it was saved.
        nbytes: its size.
        begin: the first of its bytes in the storage of `tensor`.
        tensor: a tensor that has its storage; None: it is in the store.
    """

    key: Key
    nbytes: int
    begin: int
    tensor: torch.Tensor | None


class RehearsedBoundaries:
    """The boundaries of one forward over tensors without values.

    A real rank lets one or two of the newest boundaries stay, as its measured times have it. Here MOST_STAYING of them
    stay in the memory that is counted, and one in the bytes that move, so that neither figure is too small.

    Attributes:
        saved_bytes: the bytes of all boundaries.
        moved: the bytes of each boundary that moves to the store, in the order in which they do.
    """

    def __init__(self, rule: OffloadRule, number_of: Callable[[torch.UntypedStorage], int]) -> None:
        """Begin without boundaries.

        Args:
            rule: decides which of them leave.
            number_of: returns a number that no other storage has.
        """
        self.saved_bytes = 0
        self.moved: list[int] = []
        self._rule = rule
        self._number_of = number_of
        self._known: dict[Key, weakref.ref[_Boundary]] = {}
        self._in_memory: Newest[_Boundary] = Newest(rule.kept_bytes)
        self._unmoved: Newest[_Boundary] = Newest(rule.kept_bytes)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose the forward."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved[_Boundary]:
        smallest = self._rule.smallest_bytes
        if not may_leave(tensor, tensor.device, smallest, FakeTensor) or not is_saved_by_checkpoint():
            # A tensor that is no leaf refers to the node that saves it, and would keep that alive.
            return tensor if tensor.is_leaf else tensor.detach()
        key = key_of(tensor, self._number_of(tensor.untyped_storage()))
        known = self._known.get(key)
        boundary = None if known is None else known()
        if boundary is None:
            boundary = self._save(tensor, key)
        return Saved.of(boundary, tensor)

    def _save(self, tensor: torch.Tensor, key: Key) -> _Boundary:
        boundary = _Boundary(key, key[3] - key[2], key[2], tensor.detach())
        self._known[key] = weakref.ref(boundary)
        self.saved_bytes += boundary.nbytes
        self.moved += [each.nbytes for each in self._unmoved.add(boundary, 1)]
        for leaving in self._in_memory.add(boundary, MOST_STAYING):
            leaving.tensor = None
        return boundary


def _unpack(packed: torch.Tensor | Saved[_Boundary]) -> torch.Tensor:
    """Return the tensor for which `_pack` returned `packed`, after its boundary has come back if it had left.

    It makes views alone, where `Saved.view` sets a storage, which the rehearsal would count as work of the model.
    """
    if not isinstance(packed, Saved):
        return packed
    boundary = packed.boundary
    if boundary.tensor is None:
        boundary.tensor, boundary.begin = torch.empty(boundary.nbytes, dtype=torch.uint8), 0
    tensor, begin = boundary.tensor, boundary.begin
    itemsize = tensor.itemsize
    flat = tensor.as_strided((boundary.nbytes // itemsize,), (1,), begin // itemsize).view(packed.dtype)
    return flat.as_strided(packed.size, packed.stride, begin // packed.dtype.itemsize + packed.offset)
