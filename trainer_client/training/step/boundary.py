"""A boundary of an activation checkpoint: which tensors it has, which bytes these are, and where the bytes are now.

This module has the records, and recognises what torch.utils.checkpoint saves. It must never copy bytes or call the
store; `activations` does.

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
        storage: the identity of their storage.
        version: the version of the tensor, which changes with each change in place.
        begin, end: the range of bytes [begin, end) in the storage.
    """

    storage: Hashable
    version: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of the bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that stays where it is, with its version when it was saved."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        """Return a tensor as it is now."""
        # A tensor that is no leaf refers to the node that saves it, and would keep that alive.
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(self) -> torch.Tensor:
        """Return the tensor; raise torch's error if it was changed since."""
        check_version(self.tensor, self.version)
        return self.tensor


Again = Callable[[Callable[[Any], torch.Tensor]], torch.Tensor]
"""Computes the tensor of a boundary, given the function that returns the tensor of what torch keeps."""


class AnyBoundary(Protocol):
    """A boundary of a real or of a rehearsed step; see `Boundary`."""

    key: Key
    nbytes: int
    again: Again | None


BoundaryT = TypeVar("BoundaryT", bound=AnyBoundary)


@dataclass(frozen=True, slots=True)
class Saved(Generic[BoundaryT]):
    """A tensor as a view of the bytes of a boundary; `offset` counts elements from the boundary's first byte."""

    boundary: BoundaryT
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, boundary: BoundaryT, tensor: torch.Tensor) -> Saved[BoundaryT]:
        """Return a tensor whose bytes are among those of the boundary."""
        offset = int(tensor.storage_offset()) - boundary.key.begin // tensor.itemsize
        return cls(boundary, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the bytes of the boundary."""
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(
            data.untyped_storage(), data.storage_offset() // self.dtype.itemsize + self.offset, self.size, self.stride
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Boundary:
    """A boundary, wherever it is.

    Attributes:
        index: its number in the order in which boundaries were saved.
        key: identifies its bytes.
        nbytes: its size.
        dropped: where the lease goes when torch drops the boundary.
        data: its bytes on the device; None: they have left it, or are about to.
        tensor: a tensor of its storage with the version to compare; None when `data` is.
        leaving: the copy into the store's memory; None: it is done, or was not begun.
        lease: the lease, parked or not; None: it has none.
        coming: the recall of a parked lease that was requested.
        ahead: the copy from the lease to the device.
        is_changed: whether the tensor was changed in place before it was copied.
        again: computes a tensor that has its bytes, if it is to be computed again.
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
        """Whether its lease is about to be parked: the copy is not done, or the call that is owed after it is not made.

        A copy may be done some time before that call, in which the store would refuse a recall.
        """
        has_lease = self.lease is not None and self.lease.parked is None and self.ahead is None
        return self.leaving is not None and has_lease and not self.is_changed

    def __del__(self) -> None:
        """Hand over what is to be given back; see [Note: who drops a boundary]."""
        self.dropped.append(self.give_up())

    @classmethod
    def of(cls, tensor: torch.Tensor, key: Key, index: int, dropped: deque[Dropped]) -> Boundary:
        """Return the boundary of a tensor on the device, whose bytes are the ones of `key`."""
        data = _bytes_of(tensor, key)
        return cls(index=index, key=key, nbytes=key.nbytes, dropped=dropped, data=data, tensor=tensor.detach())

    def take(self, tensor: torch.Tensor) -> None:
        """Have the bytes of a tensor that was computed again.

        Raises:
            RuntimeError: the tensor lies in another way in its storage than the one that was saved.
        """
        if range_of(tensor) != (self.key.begin, self.key.end):
            raise RuntimeError(
                f"a checkpointed module has returned {list(tensor.shape)} with strides {list(tensor.stride())} when it "
                "was run again, which takes other bytes than in the forward: set paramserver.activations.recompute to "
                "false"
            )
        self.data = _bytes_of(tensor, self.key)

    def give_up(self) -> Dropped:
        """Return what is to be given back, after which the boundary has no bytes. Idempotent."""
        given_back = Dropped(self.index, self.key, self.lease, self.ahead)
        self.data = self.tensor = self.lease = self.ahead = self.coming = self.again = None
        return given_back


class Newest(Generic[BoundaryT]):
    """The newest boundaries, which have not left the device yet."""

    def __init__(self, kept_bytes: int) -> None:
        """Keep as many of them as have `kept_bytes` together, at least."""
        self._kept_bytes = kept_bytes
        self._references: deque[weakref.ref[BoundaryT]] = deque()

    def add(self, boundary: BoundaryT, most: int) -> list[BoundaryT]:
        """Add the newest boundary, and return those that are to leave the device, oldest first.

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
        """Forget all of them."""
        self._references.clear()


@dataclass(frozen=True, slots=True)
class Dropped:
    """What is left of a boundary that torch has dropped."""

    index: int
    key: Key
    lease: LeasedBytes | None
    ahead: CopyAhead | None


def saving_checkpoint() -> FrameType | None:
    """Return the frame of torch.utils.checkpoint that has the tensor saved for which torch calls this one's caller.

    It is None if other code has the tensor saved.
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
    """Return the identity of the bytes that are moved for a tensor in a storage, which no other storage must equal."""
    begin, end = range_of(tensor)
    return Key(storage, tensor._version, begin, end)


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes [begin, end) of its storage that are moved for a tensor; see the note on storages."""
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
    """Raise what torch raises for a tensor that was changed after it was saved."""
    if tensor._version != version:
        raise RuntimeError(CHANGED)
