"""A boundary of an activation checkpoint: which tensors it has, which bytes these are, and where the bytes are now.

This module has the records, and recognises what torch.utils.checkpoint saves. It must never copy bytes or call the
store; `activations` and `boundary_recalls` do.

[Note: one storage, one boundary] What is moved is a range of bytes of a storage: all of it, or the part that a tensor
spans if this is less than half. So a tensor keeps its strides, and tensors that several checkpoints save, or that are
views of one another, are moved once, as long as their version is the same.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn

from trainer_client.base.lanes.lanes import CopyAhead, PendingCopy
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.planes import LeasedBytes

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that "
    "the model saved for backward, or that it passed to torch.utils.checkpoint, was changed after that"
)


class Key(NamedTuple):
    """The identity of the bytes of a boundary when they were saved.

    Attributes:
        storage: a value that no other storage has at that time.
        version: torch's version counter of the tensor, which grows with each change in place.
        begin, end: the range of bytes [begin, end) in the storage.
    """

    storage: Hashable
    version: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of bytes in the range, which is the size of the boundary."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that torch keeps where it is, with the tensor's version counter when it was saved."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        """Return the record of a tensor and its present version, so that `unpack` notices a later change in place."""
        # A tensor that is no leaf refers to the graph node that has made it. If that node saves its own output, the
        # tensor would keep the node and its graph alive, so a detached tensor is kept.
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(self) -> torch.Tensor:
        """Return the tensor; raise torch's error if the tensor was changed after it was saved."""
        check_version(self.tensor, self.version)
        return self.tensor


Again = Callable[[Callable[[Any], torch.Tensor]], torch.Tensor]
"""Computes the tensor of a boundary. Its argument is the function that returns the tensor for what torch keeps."""


class AnyBoundary(Protocol):
    """A boundary of a training step, or of a step that `paramserver plan` simulates; see `Boundary`."""

    key: Key
    nbytes: int
    again: Again | None


BoundaryT = TypeVar("BoundaryT", bound=AnyBoundary)


@dataclass(frozen=True, slots=True)
class Saved(Generic[BoundaryT]):
    """The object that torch keeps for a saved tensor that is a view of a boundary's bytes.

    `offset` is the number of elements between the boundary's first byte and the tensor's first element.
    """

    boundary: BoundaryT
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, boundary: BoundaryT, tensor: torch.Tensor) -> Saved[BoundaryT]:
        """Return the record of `tensor`, whose bytes must lie in the range of the boundary."""
        offset = int(tensor.storage_offset()) - boundary.key.begin // tensor.itemsize
        return cls(boundary, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of `data`, the boundary's bytes on the device, in its shape and strides."""
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(
            data.untyped_storage(), data.storage_offset() // self.dtype.itemsize + self.offset, self.size, self.stride
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Boundary:
    """A boundary: on the device, in the store, or on its way.

    Attributes:
        index: the boundary's number in the order in which boundaries were saved.
        key: identifies the boundary's bytes.
        nbytes: the size of the boundary.
        dropped: where the lease goes when torch drops the boundary.
        data: the bytes on the device; None: they have left the device, or are about to.
        tensor: a tensor over the same storage, whose version counter shows whether it was changed; None when `data` is
            None.
        leaving: the copy into the store's memory; None: the copy was not begun, or backward has waited for its end.
        lease: the lease on memory of the store, parked or not; None: the boundary has no memory in the store.
        coming: the recall of a parked lease that was requested.
        ahead: the copy from the lease to the device.
        is_changed: whether the tensor was changed in place before it was copied.
        again: runs a segment again and returns a tensor with the boundary's bytes; None: no segment can do so.
    """

    index: int
    key: Key
    nbytes: int
    dropped: deque[Dropped]
    data: torch.Tensor | None
    tensor: torch.Tensor | None
    leaving: PendingCopy | None = None
    lease: LeasedBytes | None = None
    coming: Pending[LeasedBytes] | None = None
    ahead: CopyAhead | None = None
    is_changed: bool = False
    again: Again | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether the boundary's bytes are being copied into its lease, and the lease is not parked yet.

        The lease may be parked some time after the copy is done. Until then the store would refuse to recall the
        boundary.
        """
        has_lease = self.lease is not None and self.lease.parked is None and self.ahead is None
        return self.leaving is not None and has_lease and not self.is_changed

    def __del__(self) -> None:
        """Put the lease and the copy into the queue `dropped`; see activations.py [Note: who drops a boundary]."""
        self.dropped.append(self.give_up())

    @classmethod
    def of(cls, tensor: torch.Tensor, key: Key, index: int, dropped: deque[Dropped]) -> Boundary:
        """Return a boundary on the device with the range of bytes of `key` in the tensor's storage."""
        data = _bytes_of(tensor, key)
        return cls(index=index, key=key, nbytes=key.nbytes, dropped=dropped, data=data, tensor=tensor.detach())

    def take(self, tensor: torch.Tensor) -> None:
        """Use the bytes of a tensor that was computed again as those of this boundary.

        Raises:
            RuntimeError: the tensor takes another range of its storage than the tensor that was saved.
        """
        if range_of(tensor) != (self.key.begin, self.key.end):
            raise RuntimeError(
                f"a checkpointed module has returned {list(tensor.shape)} with strides {list(tensor.stride())} when it "
                "was run again, which takes other bytes than in the forward: set paramserver.activations.recompute to "
                "false"
            )
        self.data = _bytes_of(tensor, self.key)

    def give_up(self) -> Dropped:
        """Drop the bytes, and return the boundary's lease and copy, which the caller has to release. Idempotent."""
        given_back = Dropped(self.index, self.key, self.lease, self.ahead)
        self.data = self.tensor = self.lease = self.ahead = self.coming = self.again = None
        return given_back


class Newest(Generic[BoundaryT]):
    """The queue of the newest boundaries, which stay on the device, and the rule that says which of them must leave."""

    def __init__(self, kept_bytes: int) -> None:
        """Keep the newest boundaries on the device as long as they have at most `kept_bytes` together; see `add`."""
        self._kept_bytes = kept_bytes
        self._references: deque[weakref.ref[BoundaryT]] = deque()

    def add(self, boundary: BoundaryT, most: int) -> list[BoundaryT]:
        """Add the newest boundary, and return the boundaries that must leave the device now, oldest first.

        Args:
            most: the number of boundaries that may stay, also if they have more than `kept_bytes`.
        """
        alive = [each for reference in self._references if (each := reference()) is not None]
        alive.append(boundary)
        staying, leaving = sum(each.nbytes for each in alive), 0
        while len(alive) - leaving > most and staying > self._kept_bytes:
            staying -= alive[leaving].nbytes
            leaving += 1
        self._references = deque(map(weakref.ref, alive[leaving:]))
        return alive[:leaving]

    def clear(self) -> None:
        """Forget all boundaries in the queue, because the step has ended."""
        self._references.clear()


@dataclass(frozen=True, slots=True)
class Dropped:
    """The lease and the copy to the device of a boundary that torch has dropped; `Activations` releases both."""

    index: int
    key: Key
    lease: LeasedBytes | None
    ahead: CopyAhead | None


def saving_checkpoint() -> FrameType | None:
    """Return the frame of torch.utils.checkpoint that saves the tensor for which torch has called a pack hook.

    Call this only within the pack hook. Return None if other code has made torch save the tensor, so the tensor is no
    boundary.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _FUNCTION:
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_filename == _CHECKPOINT else None


def may_leave(
    tensor: torch.Tensor, device: torch.device, smallest_bytes: int, kind: type[torch.Tensor] = torch.Tensor
) -> bool:
    """Return whether a tensor could leave its device, if it is a boundary.

    Args:
        tensor: the tensor that is saved.
        device: the device of the rank; tensors of other devices stay where they are.
        smallest_bytes: a boundary with fewer bytes stays.
        kind: the class of the rank's tensors; those of other classes stay.
    """
    if not is_movable(tensor, device, kind) or not tensor.numel():
        return False
    begin, end = range_of(tensor)
    return end - begin >= smallest_bytes


def is_movable(tensor: torch.Tensor, device: torch.device, kind: type[torch.Tensor] = torch.Tensor) -> bool:
    """Return whether a tensor could leave its device if it were large enough; see `may_leave`."""
    if type(tensor) is not kind or tensor.device != device or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or (tensor.is_leaf and tensor.requires_grad):
        return False
    return not isinstance(tensor._base, nn.Parameter)


def key_of(tensor: torch.Tensor, storage: Hashable) -> Key:
    """Return the key of the bytes that are moved for a tensor. `storage` must identify the tensor's storage alone."""
    begin, end = range_of(tensor)
    return Key(storage, tensor._version, begin, end)


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes [begin, end) of a tensor's storage that are moved; see [Note: one storage, one boundary]."""
    whole = tensor.untyped_storage().nbytes()
    if not tensor.numel():
        return 0, whole
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = int(span) * tensor.itemsize
    if 2 * nbytes >= whole:
        return 0, whole
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + nbytes


def _bytes_of(tensor: torch.Tensor, key: Key) -> torch.Tensor:
    """Return the bytes of `key` [n], uint8, in the storage of a tensor."""
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return data.set_(tensor.untyped_storage(), key.begin, (key.nbytes,), (1,))


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise torch's error if a tensor was changed after it was saved with the version counter `version`."""
    if tensor._version != version:
        raise RuntimeError(CHANGED)
