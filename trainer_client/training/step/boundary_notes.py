"""Which tensors that torch saves are boundaries, which boundaries are known, and which of them are computed again.

A training rank (step/activations.py) and the plan of a rank (plan/boundaries.py) both decide by this code. This module
owns the notes of the boundaries that torch has not dropped. It must never move bytes: the owner of the boundaries does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol

import torch

from trainer_client.training.step.boundary import (
    Again,
    BoundaryT,
    Key,
    Saved,
    is_movable,
    key_of,
    may_leave,
    saving_checkpoint,
)
from trainer_client.training.step.segments import Segments


class Owner(Protocol[BoundaryT]):
    """The object that makes boundaries and frees their bytes when BoundaryNotes asks: Activations, or the plan."""

    def keep(self, tensor: torch.Tensor) -> Any:
        """Return the object that torch keeps for a tensor that is no boundary."""

    def save(self, tensor: torch.Tensor, key: Key, again: Again | None) -> BoundaryT:
        """Return a new boundary. If `again` is given, calling it later computes the boundary's tensor again."""

    def let_go(self, boundary: BoundaryT) -> None:
        """Free the bytes of a boundary that was saved with `again`, because backward can compute them."""


class BoundaryNotes(Generic[BoundaryT]):
    """The boundaries that are known on one rank, and the decision which tensors become boundaries.

    Attributes:
        segments: the segments of the model, which can compute boundaries again.
    """

    def __init__(
        self,
        owner: Owner[BoundaryT],
        identify: Callable[[torch.UntypedStorage], Hashable | None],
        *,
        device: torch.device,
        smallest_bytes: int,
        kind: type[torch.Tensor] = torch.Tensor,
    ) -> None:
        """Begin without boundaries.

        Args:
            owner: makes and frees the boundaries.
            identify: returns a value that no other storage has; None for a storage whose tensors are no boundaries.
            device: the device of the rank; tensors of other devices are no boundaries.
            smallest_bytes: tensors with fewer bytes are no boundaries, unless they are computed again.
            kind: the class of the rank's tensors.
        """
        self._owner = owner
        self._identify = identify
        self._device = device
        self._smallest_bytes = smallest_bytes
        self._kind = kind
        self._known: dict[Key, weakref.ref[BoundaryT]] = {}
        # The newest boundary that backward computes again instead of reading it. Its bytes are freed only when the next
        # such boundary is saved.
        self._newest_again: weakref.ref[BoundaryT] | None = None
        self.segments = Segments(device, pack=self._packed, key_of=self._key_of)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that torch keeps for a tensor that it saves. Only torch may call this, as its pack hook."""
        is_large, checkpoint, again = may_leave(tensor, self._device, self._smallest_bytes, self._kind), None, None
        if is_large or self.segments.is_watching:
            checkpoint = saving_checkpoint()
        if checkpoint is not None and self.segments.is_watching:
            again = self.segments.note_saved(tensor, checkpoint)
        # A tensor of any size is a boundary if a segment can compute it again; see segments.py
        # [Note: segments and ranks].
        is_boundary = checkpoint is not None and (is_large or again is not None)
        if not is_boundary or (key := self._key_of(tensor)) is None:
            return self._owner.keep(tensor)
        return Saved.of(self._find(key) or self._add(tensor, key, again), tensor)

    def discard(self, key: Key, is_over: Callable[[BoundaryT], bool]) -> None:
        """Forget the boundary of a key if torch has dropped the boundary, or if `is_over` returns True for it."""
        known = self._known.get(key)
        if known is not None and ((boundary := known()) is None or is_over(boundary)):
            del self._known[key]

    def end_step(self) -> None:
        """Forget the newest boundary that can be computed again, so that no later step frees its bytes."""
        self._newest_again = None

    def _add(self, tensor: torch.Tensor, key: Key, again: Again | None) -> BoundaryT:
        boundary = self._owner.save(tensor, key, again)
        self._known[key] = reference = weakref.ref(boundary)
        if again is not None:
            before = None if self._newest_again is None else self._newest_again()
            self._newest_again = reference
            if before is not None:
                self._owner.let_go(before)
        return boundary

    def _packed(self, tensor: torch.Tensor) -> Any:
        """Return the object that a segment keeps for one of its inputs: a view of a known boundary, or the tensor."""
        key = self._key_of(tensor)
        boundary = None if key is None else self._find(key)
        return self._owner.keep(tensor) if boundary is None else Saved.of(boundary, tensor)

    def _key_of(self, tensor: torch.Tensor) -> Key | None:
        """Return the key of a tensor's bytes; None if the tensor can be no boundary, even if it is large."""
        if not is_movable(tensor, self._device, self._kind):
            return None
        identity = self._identify(tensor.untyped_storage())
        return None if identity is None else key_of(tensor, identity)

    def _find(self, key: Key) -> BoundaryT | None:
        known = self._known.get(key)
        return None if known is None else known()
