"""The two data planes, by which the bytes of a lease reach this process: the mapped arena, or gRPC streams.

Both implement the protocol `Plane`; a session chooses one of them when it opens. A plane turns a granted lease into a
tensor and, for a write lease, makes the written bytes visible to the store. This module owns no lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from paramserver.contract.malloc_settings import keep_chunk_buffers
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.device import CPU
from trainer_client.client.transport.arena import MappedArena
from trainer_client.client.transport.channel import LEASE_DEADLINE_SECONDS, Pending
from trainer_client.client.transport.device_memory import DeviceBytes
from trainer_client.client.transport.mapping import FileRange
from trainer_client.client.transport.pinning import Pins, slices_of
from trainer_client.client.transport.streams import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlace:
    """The place of a lease's bytes in an arena that is registered with a device: they begin at byte `offset`."""

    pins: Pins
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A parked gradient, as `LeasedBytes.parked` describes it while the process does not have its bytes.

    Attributes:
        nbytes: the size of the gradient.
        sent: the future of the call that parks it, which is done when the store has the bytes.
    """

    nbytes: int
    sent: Pending[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBytes:
    """A granted lease and its bytes in this process.

    Attributes:
        lease_id: the store's id of the lease, unique within its session.
        version: for a read lease, the step that the bytes belong to.
        data: the bytes, a 1-D uint8 tensor on the CPU, or on the device (see `on_device`); valid until the lease is
            released.
        plane: the data plane of the session that the lease belongs to.
        source: the file range from which the bytes can be mapped while `data` is referenced; None: mapping is not
            possible.
        place: where the bytes are in the arena, if the arena is registered with a device; else None.
        on_device: the range of this rank's device memory that `data` is; None: the bytes are in host memory.
        keep: a range of this rank's device memory to which the bytes are copied, too, before the lease is released with
            `SlabLeases.release`; None: they are not kept there.
        asks_to_park: whether the store asks this rank to park the gradient when it is not used for a while.
        parked: set if the gradient is parked. `data` is then the copy that the journal keeps, or empty without one.
    """

    lease_id: int
    version: int
    data: torch.Tensor
    plane: Plane
    source: FileRange | None = None
    place: ArenaPlace | None = None
    on_device: DeviceBytes | None = None
    keep: DeviceBytes | None = None
    asks_to_park: bool = False
    parked: Parked | None = None

    @property
    def nbytes(self) -> int:
        """The size of the lease in bytes, also if it is parked and `data` lacks the bytes."""
        return self.data.numel() if self.parked is None else self.parked.nbytes

    @property
    def has_data(self) -> bool:
        """Whether `data` has the bytes of the lease. It is False for a parked gradient."""
        return self.data.numel() == self.nbytes

    def is_same_lease(self, other: LeasedBytes) -> bool:
        """Return whether both are one lease of one session, although the bytes of one of them may be parked."""
        return self.plane is other.plane and self.lease_id == other.lease_id

    @property
    def is_pinned(self) -> bool:
        """Whether a device can copy the bytes while the host goes on.

        If so, the lease must not be released, handed over or published before the device has done the copy. Bytes that
        were copied out of the lease count for a vote only if `Plane.check` succeeds after the copy, see
        `StepCalls.commit`.
        """
        return self.place is not None and self.place.pins.is_pinned(self.place.offset, self.data.numel())

    def pieces(self) -> Iterator[slice]:
        """Return the slices of `data` that are copied one by one, in order, because a device may refuse one large copy.

        Each begins and ends at a multiple of the page size, except for the end of `data`.
        """
        return slices_of(self.data)

    def begin_fill(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Begin to write `values` [n], converted to `dtype`, from any device; on the CPU, return when it is done.

        On an accelerator the copy is work of the current stream.
        """
        if values.device.type == CPU:
            self.data.view(dtype).copy_(values)
            return
        source = values.to(dtype).view(torch.uint8)
        for piece in self.pieces():
            self.data[piece].copy_(source[piece], non_blocking=True)


class Plane(Protocol):
    """The methods of a data plane, which turns leases into tensors. ArenaPlane and StreamPlane implement them."""

    @property
    def name(self) -> str: ...

    @property
    def is_mapped(self) -> bool:
        """Whether the tensors of leases are views of the store's own memory, so that no bytes are copied."""

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        """Return a granted read lease with its bytes, which the store or a stream has brought."""

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        """Return a write lease with uninitialised bytes, which the caller fills."""

    def flush(self, leased: LeasedBytes) -> None:
        """Make the bytes of a write lease visible to the store.

        For a parked gradient, wait instead until the store has the bytes that were sent when it was parked.
        """

    def check(self) -> None:
        """Check that leases of this plane were still valid while their bytes were used.

        Call this after the bytes of a lease were read, and before anything that was computed from them is used.

        Raises:
            SessionEndedError: the session has ended, so its leases are void and their memory may already hold the bytes
                of another session.
        """


class ArenaPlane:
    """The plane that views the shared arena: no bytes are copied or sent."""

    name = "arena"
    is_mapped = True

    def __init__(self, arena: MappedArena) -> None:
        self._arena = arena

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        data = self._arena.view(lease.arena_offset, lease.size_bytes)
        source = self._arena.file_range(lease.arena_offset)
        pins = self._arena.pins
        place = None if pins is None else ArenaPlace(pins=pins, offset=lease.arena_offset)
        return LeasedBytes(
            lease_id=lease.lease_id, version=lease.version, data=data, plane=self, source=source, place=place
        )

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        return self.open_read(lease)

    def flush(self, leased: LeasedBytes) -> None:
        """Wait until a gradient that was parked is in the store. Other bytes are in the store's memory already."""
        if leased.parked is not None:
            leased.parked.sent.wait()

    def check(self) -> None:
        self._arena.check()


class StreamPlane:
    """The plane that copies bytes between private buffers and the store in chunks, over gRPC streams."""

    name = "streams"
    is_mapped = False

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        keep_chunk_buffers()

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        leased = self.open_write(lease)
        source = pb.ReadRequest.Open(lease_id=lease.lease_id)
        self._streams.read(source, leased.data.numpy().data, LEASE_DEADLINE_SECONDS)
        return leased

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        data = torch.empty(lease.size_bytes, dtype=torch.uint8)
        return LeasedBytes(lease_id=lease.lease_id, version=lease.version, data=data, plane=self)

    def flush(self, leased: LeasedBytes) -> None:
        if leased.parked is not None:
            leased.parked.sent.wait()
            return
        self._streams.write(leased.lease_id, leased.data.numpy().data, LEASE_DEADLINE_SECONDS)

    def check(self) -> None:
        """Do nothing, because a private buffer keeps its bytes when the session ends."""


def check(leases: Iterable[LeasedBytes]) -> None:
    """Check that the leases were valid while their bytes were used: run `Plane.check` once for each plane of them.

    It can raise SessionEndedError.
    """
    for plane in {id(leased.plane): leased.plane for leased in leases}.values():
        plane.check()
