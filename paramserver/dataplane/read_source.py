"""The two sources of a Read: the bytes of a lease, and a range of a tensor by name.

A source returns any piece of its bytes on demand and keeps none, so a client that stops reading holds no memory through
it. Only this module resolves the source that a Read request names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from paramserver.rpc import convert
from paramserver.sessions.leases import Lease, LeaseMode
from paramserver.sessions.session import Session
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import ConflictError, InvalidRequestError
from storage.base.shard import DType, Kind
from storage.engine import Engine
from storage.steps.reader import StepReader


class ReadSource(Protocol):
    """The bytes of one version of a slab or of a tensor's range; `version` is its step, `job` the name of its job.

    `dtype` is None for an activation, whose type the store does not know.
    """

    @property
    def job(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def dtype(self) -> DType | None: ...

    async def piece(self, first_byte: int, nbytes: int) -> memoryview | bytes:
        """Return `nbytes` bytes from `first_byte` on. They are valid until the caller's next `await`.

        Raises:
            ConflictError: the lease has ended, or the range has changed.
            StorageError: the bytes cannot be read.
        """


async def open_source(engine: Engine, session: Session, request: pb.ReadRequest.Open) -> ReadSource:
    """Return the object that gives the bytes which a Read request names: those of a lease, or of a reader's tensor.

    Raises:
        InvalidRequestError: the request names no source, or a range that no tensor can have.
        NotFoundError: the session has no such lease or reader, or this store holds no such range.
        ConflictError: the lease is for writing.
    """
    match request.WhichOneof("source"):
        case "lease_id":
            return _open_lease(engine, session.lease(request.lease_id))
        case "range":
            return await _open_range(engine, session, request.range)
        case _:
            raise InvalidRequestError("source is not set; set lease_id or range")


def check_held(lease: Lease) -> None:
    """Check that a lease has not ended. Call this after every `await`, before the lease's memory is touched.

    Raises:
        ConflictError: the lease has ended, because its session ended or the client returned it.
    """
    if lease.void:
        raise ConflictError(f"lease {lease.lease_id} ended while its bytes were streamed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeaseSource:
    engine: Engine
    lease: Lease
    job: str
    size_bytes: int
    version: int
    dtype: DType | None

    async def piece(self, first_byte: int, nbytes: int) -> memoryview:
        check_held(self.lease)
        return self.engine.host.view(self.lease.arena_range)[first_byte : first_byte + nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RangeSource:
    job: str
    size_bytes: int
    version: int
    dtype: DType
    # A function that is called as read(first_element, element_count), and yields the bytes of these elements of the
    # range.
    read: Callable[[int, int], AsyncGenerator[bytes, None]]
    # A function that raises ConflictError if any slab of the range has a newer version than when the source was opened.
    check: Callable[[], None]

    async def piece(self, first_byte: int, nbytes: int) -> bytes:
        itemsize = self.dtype.itemsize
        first, end = first_byte // itemsize, -(-(first_byte + nbytes) // itemsize)
        async with aclosing(self.read(first, end - first)) as pieces:
            data = b"".join([piece async for piece in pieces])
        self.check()
        start = first_byte - first * itemsize
        return data if len(data) == nbytes else data[start : start + nbytes]


def _open_lease(engine: Engine, lease: Lease) -> ReadSource:
    if lease.reader is not None and lease.dtype is not None:
        return _LeaseSource(
            engine=engine,
            lease=lease,
            job=lease.reader.job.spec.name,
            size_bytes=lease.nbytes,
            version=lease.step,
            dtype=lease.dtype,
        )
    if (parkable := lease.parkable) is not None:
        return _LeaseSource(
            engine=engine,
            lease=lease,
            job=parkable.job,
            size_bytes=lease.nbytes,
            version=0,
            dtype=None if lease.gradient is None else lease.gradient.dtype,
        )
    if lease.mode is not LeaseMode.READ or lease.pin is None:
        raise ConflictError(f"lease {lease.lease_id} is for writing ({lease.mode.value}) and cannot be read")
    slab = lease.pin.slab
    return _LeaseSource(
        engine=engine,
        lease=lease,
        job=slab.key.job_name,
        size_bytes=lease.nbytes,
        version=lease.pin.copy.step or 0,
        dtype=slab.spec.dtype,
    )


async def _open_range(engine: Engine, session: Session, range_: pb.TensorRange) -> ReadSource:
    convert.check_range(range_)
    kind = convert.kind(range_.kind)
    if range_.reader_id:
        return await _open_held_range(session.reader(range_.reader_id), range_, kind)
    job = await session.job()
    slabs = await engine.reader.slabs(job, range_.fqn, kind, range_.offset, range_.numel)
    versions = [slab.latest for slab in slabs]
    dtype, version = slabs[0].spec.dtype, versions[0] or 0

    def check() -> None:
        if any(slab.latest != version for slab, version in zip(slabs, versions, strict=True)):
            raise ConflictError(f"{range_.fqn!r} changed after step {version} while it was read; read it again")

    return _RangeSource(
        job=job.spec.name,
        size_bytes=range_.numel * dtype.itemsize,
        version=version,
        dtype=dtype,
        read=lambda first, count: engine.reader.read(job, range_.fqn, kind, range_.offset + first, count),
        check=check,
    )


async def _open_held_range(reader: StepReader, range_: pb.TensorRange, kind: Kind) -> ReadSource:
    dtype = await reader.describe(range_.fqn, kind, range_.offset, range_.numel)
    return _RangeSource(
        job=reader.job.spec.name,
        size_bytes=range_.numel * dtype.itemsize,
        version=reader.step,
        dtype=dtype,
        read=lambda first, count: reader.read(range_.fqn, kind, range_.offset + first, count),
        # A reader's step does not change while the reader is open, so no check for newer versions is needed.
        check=lambda: None,
    )
