"""A boundary of an activation checkpoint: which tensors it has, which bytes these are, and where the bytes are now.

This module has the records, and recognises what torch.utils.checkpoint saves. It must never copy bytes or call the
store; `activations` does.

[Note: one storage, one boundary] What is moved is a range of bytes of a storage: all of it, or the part that a tensor
spans if this is less than half. So a tensor keeps its strides, and tensors that several checkpoints save, or that are
views of one another, are moved once, as long as their version is the same.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from types import FrameType

import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from trainer_client.lanes.lanes import Copy, CopyAhead
from trainer_client.transport.channel import Pending
from trainer_client.transport.planes import LeasedBytes

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that "
    "the model saved for backward, or that it passed to torch.utils.checkpoint, was changed after that"
)

# The identity of the bytes of a boundary: the storage, the version of the tensor, and the range of bytes.
Key = tuple[StorageWeakRef, int, int, int]


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that stays where it is, with its version when it was saved."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """Return the tensor; raise torch's error if it was changed since."""
        check_version(self.tensor, self.version)
        return self.tensor


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor as a view of the bytes of a boundary."""

    boundary: Boundary
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

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
        key: identifies its bytes when it was saved.
        nbytes: its size.
        dropped: where the lease goes when torch drops the boundary.
        data: its bytes on the device; None: they have left it, or are about to.
        tensor: a tensor of its storage with the version to compare; None when `data` is.
        leaving: the copy into the store's memory; None: it is done, or was not begun.
        lease: the lease, parked or not; None: it has none.
        coming: the recall of a parked lease that was requested.
        ahead: the copy from the lease to the device.
        is_changed: whether the tensor was changed in place before it was copied.
    """

    index: int
    key: Key
    nbytes: int
    dropped: deque[Dropped]
    data: torch.Tensor | None
    tensor: torch.Tensor | None
    leaving: Copy | None = None
    lease: LeasedBytes | None = None
    coming: Pending[LeasedBytes] | None = None
    ahead: CopyAhead | None = None
    is_changed: bool = False

    def __del__(self) -> None:
        """Hand over what is to be given back; see [Note: who drops a boundary]."""
        self.dropped.append(self.give_up())

    def give_up(self) -> Dropped:
        """Return what is to be given back, after which the boundary has no bytes. Idempotent."""
        given_back = Dropped(self.index, self.key, self.lease, self.ahead)
        self.data = self.tensor = self.lease = self.ahead = self.coming = None
        return given_back


@dataclass(frozen=True, slots=True)
class Dropped:
    """What is left of a boundary that torch has dropped."""

    index: int
    key: Key
    lease: LeasedBytes | None
    ahead: CopyAhead | None


def is_saved_by_checkpoint() -> bool:
    """Return whether torch.utils.checkpoint has the tensor saved for which torch calls the caller of this function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _FUNCTION:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes [begin, end) of its storage that are moved for a tensor; see the note on storages."""
    whole = tensor.untyped_storage().nbytes()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = int(span) * tensor.itemsize
    if 2 * nbytes >= whole:
        return 0, whole
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + nbytes


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise what torch raises for a tensor that was changed after it was saved."""
    if tensor._version != version:
        raise RuntimeError(CHANGED)
