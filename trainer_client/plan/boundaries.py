"""The boundaries of activation checkpoints in a rehearsed step, which leave the device as in a real step.

The rules of training/step/boundary.py decide what a boundary is and which boundaries leave the device. This module only
assumes how many of the newest boundaries stay, where a real rank decides by its measured times. It must never call a
store.
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
    """The values of the config's keys that decide which boundaries leave the device.

    Attributes:
        smallest_bytes: boundaries with fewer bytes stay on the device.
        kept_bytes: the most bytes of the newest boundaries that stay on the device together.
        recomputing: chooses the units that compute each second boundary again. None: no boundary is computed again, so
            all stay or move to the store, as at the beginning of a run that chooses by its measured times.
    """

    smallest_bytes: int
    kept_bytes: int
    recomputing: UnitsSection | None = None

    @classmethod
    def of(cls, config: TrainingConfig) -> OffloadRule | None:
        """Return the rule that a config gives; None if the config leaves all boundaries on the device."""
        section = config.paramserver.activations
        if not config.offloads_activations:
            return None
        units = config.paramserver.units if section.recompute is True else None
        return cls(smallest_bytes=int(section.smallest), kept_bytes=int(section.kept), recomputing=units)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Boundary:
    """A boundary that `RehearsedBoundaries` has recorded, with the tensor that has its bytes.

    Attributes:
        key: identifies the boundary's bytes.
        nbytes: the boundary's size.
        begin: the place of the boundary's first byte in the storage of `tensor`.
        tensor: a tensor whose storage has the boundary's bytes; None: the boundary is in the store, or has to be
            computed again.
        again: computes the boundary again; None: it moves to the store instead. See `Boundary` in
            training/step/boundary.py.
    """

    key: Key
    nbytes: int
    begin: int
    tensor: torch.Tensor | None
    again: Again | None = None


class RehearsedBoundaries:
    """The boundaries of one forward over tensors without values.

    A real rank lets one or two of the newest boundaries stay, which it decides by its measured times. The plan cannot
    know the number. So the memory is counted as if MOST_STAYING boundaries stayed, and the bytes that move as if one
    stayed, so that neither figure is too small.

    Attributes:
        saved_bytes: the bytes of all boundaries.
        moved: the bytes of each boundary that moves to the store, in the order in which the boundaries move.
        again_bytes: the bytes of the boundaries that are freed in the forward and computed again in the backward.
    """

    def __init__(
        self, rule: OffloadRule, number_of: Callable[[torch.UntypedStorage], int | None], model: nn.Module
    ) -> None:
        """Begin without boundaries.

        Args:
            rule: decides which boundaries leave the device.
            number_of: returns the number of a storage, which no other storage has; None for a storage whose bytes are
                not counted.
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
        """Record the boundaries of the forward that runs within the context."""
        try:
            with saved_tensors_hooks(self._notes.pack, self._unpack):
                yield
        finally:
            self._notes.segments.is_watching = False
            self._notes.segments.forget()

    # `BoundaryNotes` calls the methods `keep`, `save` and `let_go`, because this object is the Owner of its notes.

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that torch's autograd saves for the backward in place of one that is no boundary."""
        # A tensor that is no leaf refers to the autograd node that saves it, so tensor and node would keep each other
        # alive. So the tensor is detached.
        return tensor if tensor.is_leaf else tensor.detach()

    def save(self, tensor: torch.Tensor, key: Key, again: Again | None) -> _Boundary:
        """Record a new boundary and return it.

        Unless `again` computes it again, the boundary joins the newest ones on the device. If these then take more than
        the rule's `kept_bytes` together, the oldest of them leave: their bytes are counted in `moved`, and freed.
        """
        boundary = _Boundary(key, key.nbytes, key.begin, tensor.detach(), again)
        self.saved_bytes += boundary.nbytes
        if again is None:
            self.moved += [each.nbytes for each in self._unmoved.add(boundary, 1)]
            for leaving in self._in_memory.add(boundary, MOST_STAYING):
                leaving.tensor = None
        return boundary

    def let_go(self, boundary: _Boundary) -> None:
        """Free the bytes of a boundary, because the backward can compute them again, and add them to `again_bytes`."""
        self.again_bytes += boundary.nbytes
        boundary.tensor = None

    def _unpack(self, packed: torch.Tensor | Saved[_Boundary]) -> torch.Tensor:
        """Return the tensor for which `pack` returned `packed`. If its boundary has left the device, bring it back.

        This function makes only views. `Saved.view` is not used, because it sets the storage of a tensor, which the
        rehearsal would count as an operation of the model.
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
