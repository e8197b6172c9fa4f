"""The memory of a rank's device that it offers to the store's gpu tier for copies of slabs.

The store says which slab's bytes lie at which offset; this module owns the memory, and the order of the copies to it
and from it. It must never decide what is kept, nor read a range without a lease on it.

[Note: order of copies] A range is written by copies on the device, behind the gather that has brought the bytes there,
and read by later gathers. All of these are work of the current stream, or of a lane that the current stream waits for.
A script may run its passes on different streams. So each use of the memory waits for the event behind the last use,
which costs nothing on the same stream. A lease is released as soon as its work was given to the device: the work on the
range's next lease comes after it, because it waits for the same event.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paramserver.v1 import parameter_store_pb2 as pb

# The store places each copy of a slab in the offered device memory at a multiple of this many bytes.
ALIGN_BYTES = 512


def room_for(nbytes: int) -> int:
    """Return how many bytes of the offered memory a copy of `nbytes` takes: `nbytes` rounded up to ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class OfferedMemory:
    """The memory of one device that a rank has offered to the store, in which the rank keeps copies of slabs.

    Attributes:
        device: the device.
        nbytes: how much of it is offered.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._last_use: torch.Event | None = None

    def range(self, granted: pb.DeviceRange, nbytes: int) -> DeviceBytes:
        """Return the first `nbytes` of the range that the store has granted with a lease."""
        return DeviceBytes(memory=self, data=self._memory[granted.offset : granted.offset + nbytes])

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Enclose work of the current stream that reads or writes the memory, so that it comes after earlier work.

        See [Note: order of copies].
        """
        stream = torch.accelerator.current_stream(self.device)
        self._wait_for_last_use(stream)
        try:
            yield
        finally:
            self._last_use = stream.record_event()

    def _wait_for_last_use(self, stream: torch.Stream) -> None:
        # The wait for the last use of the memory has a method of its own, so that a test can leave the wait out.
        if self._last_use is not None:
            stream.wait_event(self._last_use)

    def resize(self, nbytes: int) -> None:
        """Make the memory smaller or larger; what is in its first bytes stays.

        While the bytes that stay are copied, both the old and the new memory are there, unless one of them is empty.
        """
        self._wait_for_device()
        self._memory.untyped_storage().resize_(nbytes)
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self._memory.untyped_storage())
        self.nbytes = nbytes

    def renew(self) -> None:
        """Take new memory in place of the present one, because the next daemon does not know the copies in it.

        The former memory is freed when the last range of it is not used any more.
        """
        self._wait_for_device()
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def _wait_for_device(self) -> None:
        # The allocator gives freed memory to the stream that has allocated it, although other streams may still read
        # the memory. So this waits until all streams of the device are done.
        torch.accelerator.synchronize(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """A range of device memory that the store has granted with a lease.

    Attributes:
        data: the bytes, a 1-D uint8 tensor on the device.
    """

    memory: OfferedMemory
    data: torch.Tensor

    def keep(self, values: torch.Tensor) -> None:
        """Copy `values` [n], which are on the device, to this range, where the store lets later gathers read them."""
        with self.memory.in_order():
            self.data.view(values.dtype).copy_(values)
