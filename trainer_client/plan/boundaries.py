"""The boundaries of activation checkpoints in a rehearsed step, which leave the device as they do in a real one.

The rules of training/step/boundary.py decide what a boundary is and which ones leave. This module owns the assumption
about how many of the newest stay, which a real step measures. It must never call a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from trainer_client.config.paramserver import UnitsSection
from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.model.unit_policy import choose_policy, find_units
from trainer_client.training.step.boundary import Again, Key, Newest, Saved
from trainer_client.training.step.boundary_notes import BoundaryNotes
from trainer_client.training.step.recall_depth import MOST_STAYING


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRule:
    """The keys that decide which boundaries leave the device.

    Attributes:
        smallest_bytes: boundaries with fewer bytes stay.
        kept_bytes: the bytes of the newest boundaries that stay.
        recomputing: chooses the units that compute each second boundary again; None: all boundaries are kept or move,
            as at the beginning of a run that chooses by its measured times.
    """

    smallest_bytes: int
    kept_bytes: int
    recomputing: UnitsSection | None = None

    @classmethod
    def of(cls, config: TrainingConfig) -> OffloadRule | None:
        """Return the rule of a config; None if all boundaries stay on the device."""
        section = config.paramserver.activations
        if not config.offloads_activations:
            return None
        units = config.paramserver.units if section.recompute is True else None
        return cls(smallest_bytes=int(section.smallest), kept_bytes=int(section.kept), recomputing=units)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Boundary:
    """A boundary of the rehearsal.

    Attributes:
        key: identifies its bytes.
        nbytes: its size.
        begin: the first of its bytes in the storage of `tensor`.
        tensor: a tensor that has its storage; None: it is in the store, or has to be computed again.
        again: see `Boundary`.
    """

    key: Key
    nbytes: int
    begin: int
    tensor: torch.Tensor | None
    again: Again | None = None


class RehearsedBoundaries:
    """The boundaries of one forward over tensors without values.

    A real rank lets one or two of the newest boundaries stay, as its measured times have it. Here MOST_STAYING of them
    stay in the memory that is counted, and one in the bytes that move, so that neither figure is too small.

    Attributes:
        saved_bytes: the bytes of all boundaries.
        moved: the bytes of each boundary that moves to the store, in the order in which they do.
        again_bytes: the bytes of the boundaries that are freed, and computed again.
    """

    def __init__(
        self, rule: OffloadRule, number_of: Callable[[torch.UntypedStorage], int | None], model: nn.Module
    ) -> None:
        """Begin without boundaries.

        Args:
            rule: decides which of them leave.
            number_of: returns a number that no other storage has; None for a storage that is not counted.
            model: the model, whose units may compute boundaries again.
        """
        self.saved_bytes = 0
        self.moved: list[int] = []
        self.again_bytes = 0
        self._in_memory: Newest[_Boundary] = Newest(rule.kept_bytes)
        self._unmoved: Newest[_Boundary] = Newest(rule.kept_bytes)
        self._notes: BoundaryNotes[_Boundary] = BoundaryNotes(
            self, number_of, device=torch.device("cpu"), smallest_bytes=rule.smallest_bytes, kind=FakeTensor
        )
        if rule.recomputing is not None:
            self._notes.segments.is_watching = True
            units = find_units(model, (), choose_policy(rule.recomputing, None))
            self._notes.segments.watch(unit.module for unit in units if unit.fqn)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose the forward."""
        try:
            with saved_tensors_hooks(self._notes.pack, self._unpack):
                yield
        finally:
            self._notes.segments.is_watching = False
            self._notes.segments.forget()

    # These methods are called by the notes.

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what torch keeps of a tensor that is no boundary."""
        # A tensor that is no leaf refers to the node that saves it, and would keep that alive.
        return tensor if tensor.is_leaf else tensor.detach()

    def save(self, tensor: torch.Tensor, key: Key, again: Again | None) -> _Boundary:
        """Return a new boundary, and let older ones leave."""
        boundary = _Boundary(key, key.nbytes, key.begin, tensor.detach(), again)
        self.saved_bytes += boundary.nbytes
        if again is None:
            self.moved += [each.nbytes for each in self._unmoved.add(boundary, 1)]
            for leaving in self._in_memory.add(boundary, MOST_STAYING):
                leaving.tensor = None
        return boundary

    def let_go(self, boundary: _Boundary) -> None:
        """Keep the bytes of a boundary no longer, because they can be computed again."""
        self.again_bytes += boundary.nbytes
        boundary.tensor = None

    def _unpack(self, packed: torch.Tensor | Saved[_Boundary]) -> torch.Tensor:
        """Return the tensor for which `pack` returned `packed`, after its boundary has come back if it had left.

        It makes views alone, where `Saved.view` sets a storage, which the rehearsal would count as work of the model.
        """
        if not isinstance(packed, Saved):
            return packed
        boundary = packed.boundary
        if boundary.tensor is None and boundary.again is not None:
            boundary.tensor = boundary.again(self._unpack)
        elif boundary.tensor is None:
            boundary.tensor, boundary.begin = torch.empty(boundary.nbytes, dtype=torch.uint8), 0
        boundary.again = None
        tensor, begin = boundary.tensor, boundary.begin
        itemsize = tensor.itemsize
        flat = tensor.as_strided((boundary.nbytes // itemsize,), (1,), begin // itemsize).view(packed.dtype)
        return flat.as_strided(packed.size, packed.stride, begin // packed.dtype.itemsize + packed.offset)
