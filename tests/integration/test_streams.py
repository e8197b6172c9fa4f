"""Clients that cannot map the arena read and write the same bytes over streams, in messages of bounded size."""

from __future__ import annotations

import grpc
import torch

from paramserver import vocabulary
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import DType, Kind
from tests.integration.support.store_client import Clients, Rank, refused
from tests.integration.support.stream_client import MIB, Reading, Writing, read, seal, write
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
# A group has 2.4 MB of weights: several chunks, and the last one has an odd size.
WIDE = Layout(numels=(600_001,), groups=("a",), with_skips=False)


def leased_bytes(rank: Rank, lease: pb.Lease) -> bytes:
    """Return the lease's bytes from the mapped arena."""
    return rank.map_arena()[lease.arena_offset : lease.arena_offset + lease.size_bytes]


def test_a_read_lease_streams_what_the_arena_holds(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, numels=WIDE.numels, groups=WIDE.groups)).begin()
    rank.train(1, 2)
    for kind in rank.layout.kinds:
        lease = rank.acquire("a", kind, pb.LEASE_MODE_READ)
        header, data = read(rank, lease_id=lease.lease_id)
        assert (header.version, header.dtype, header.size_bytes) == (2, pb.DTYPE_FLOAT32, lease.size_bytes)
        assert data == leased_bytes(rank, lease)
        rank.release(lease)


def test_a_run_over_streams_alone_has_the_bits_of_torch(clients: Clients, job: str) -> None:
    """Initial values and gradients are written, and weights and moments are read, over streams only. The arena serves
    only to check the bytes."""
    layout = Layout(name=job, numels=(300_001,), groups=("a",), precision=DType.BFLOAT16, with_skips=False)
    rank = clients.rank(layout)
    rank.open()
    rank.register()
    padding = b"\0" * 2 * (-300_001 % 16)
    for kind in (Kind.MASTER, Kind.PARAM):
        lease = rank.acquire("a", kind, pb.LEASE_MODE_WRITE)
        values = raw(rank.reference.initial("a", 0).to(layout.dtype(kind).torch))
        # The client writes the values in two pieces, the second one first.
        write(rank, lease.lease_id, values[MIB // 2 :], first_byte=MIB // 2)
        write(rank, lease.lease_id, values[: MIB // 2])
        assert leased_bytes(rank, lease)[: len(values)] == values
        rank.release(lease, publish=True)
    rank.commit(0)
    for step in (1, 2):
        lease = rank.acquire("a", Kind.GRAD, pb.LEASE_MODE_WRITE, step=step)
        gradient = raw(rank.reference.gradient(step, "a", 0)) + padding
        assert write(rank, lease.lease_id, gradient) == lease.size_bytes
        rank.apply(step, lease, group="a")
        rank.commit(step)
    for kind in layout.kinds:
        source = pb.TensorRange(fqn="a.weight.0", kind=vocabulary.KIND_TO_WIRE[kind], offset=0, numel=300_001)
        header, data = read(rank, range=source)
        assert (header.version, header.dtype) == (2, vocabulary.DTYPE_TO_WIRE[layout.dtype(kind)])
        assert data == raw(rank.reference.states(2)["a", "a.weight.0", kind])


def test_ranges_by_name_are_exact(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, numels=WIDE.numels, groups=WIDE.groups)).begin()
    expected = rank.reference.states(0)["a", "a.weight.0", Kind.PARAM]
    for start, stop in [(0, 600_001), (600_000, 600_001), (1, 2), (262_143, 524_289)]:
        source = pb.TensorRange(fqn="a.weight.0", kind=pb.KIND_PARAM, offset=start, numel=stop - start)
        assert read(rank, range=source)[1] == raw(expected[start:stop])
    _, zeros = read(rank, range=pb.TensorRange(fqn="a.weight.0", kind=pb.KIND_EXP_AVG, offset=7, numel=500_000))
    assert not any(zeros)
    for fqn, offset, numel, code, named in [
        ("nothing", 0, 1, CODE.NOT_FOUND, "no element 0 of 'nothing'"),
        ("a.weight.0", 600_000, 2, CODE.NOT_FOUND, "no element 600001"),
        ("a.weight.0", 0, 0, CODE.INVALID_ARGUMENT, "numel 0 is no range"),
        ("a.weight.0", (1 << 64) - 1, 1, CODE.INVALID_ARGUMENT, "is no range"),
    ]:
        with refused(code, named):
            read(rank, range=pb.TensorRange(fqn=fqn, kind=pb.KIND_PARAM, offset=offset, numel=numel))
    with refused(CODE.NOT_FOUND, "has no slab of kind master"):
        read(rank, range=pb.TensorRange(fqn="a.weight.0", kind=pb.KIND_MASTER, numel=1))
    with refused(CODE.INVALID_ARGUMENT, "source is not set"):
        read(rank)


def test_a_read_begins_at_any_byte_and_stays_within_its_credit(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, numels=WIDE.numels, groups=WIDE.groups)).begin()
    lease = rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
    whole = leased_bytes(rank, lease)
    source = pb.TensorRange(fqn="a.weight.0", kind=pb.KIND_PARAM, offset=16, numel=600_001 - 16)
    for first_byte in (1, MIB + 3, lease.size_bytes - 1, lease.size_bytes):
        assert read(rank, lease_id=lease.lease_id, first_byte=first_byte)[1] == whole[first_byte:]
    for first_byte in (1, MIB + 3):
        assert read(rank, range=source, first_byte=first_byte)[1] == whole[64 + first_byte : 600_001 * 4]
    reading = Reading(rank, lease_id=lease.lease_id, credit_bytes=10)
    assert reading.header().size_bytes == lease.size_bytes
    chunks = reading.chunks()
    assert len(next(chunks).data) == 10
    reading.grant(5)
    reading.half_close()
    assert len(next(chunks).data) == 5
    with refused(CODE.INVALID_ARGUMENT, "before it had granted all credit"):
        next(chunks)
    with refused(CODE.INVALID_ARGUMENT, f"first_byte {lease.size_bytes + 1} is behind the end"):
        read(rank, lease_id=lease.lease_id, first_byte=lease.size_bytes + 1)
    with refused(CODE.INVALID_ARGUMENT, "credit_bytes is 0"):
        Reading(rank, lease_id=lease.lease_id, credit_bytes=0).header()
    with refused(CODE.INVALID_ARGUMENT, "urgency"):
        Reading(rank, lease_id=lease.lease_id, credit_bytes=1, urgency=77).header()
    with refused(CODE.INVALID_ARGUMENT, "first message of a read must be open"):
        next(rank.store.Read(iter([pb.ReadRequest(credit=pb.Credit(bytes=1))]), timeout=20))


def test_a_write_must_bring_exactly_what_it_announced_into_a_lease_for_writing(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    reading = rank.acquire("block.0", Kind.PARAM, pb.LEASE_MODE_READ)
    before = leased_bytes(rank, reading)
    with refused(CODE.FAILED_PRECONDITION, "is for reading and cannot be written"):
        write(rank, reading.lease_id, b"xxxx")
    lease = rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    write(rank, lease.lease_id, b"x" * (lease.size_bytes - 4), first_byte=4)
    write(rank, lease.lease_id, b"xx")
    # The two bytes that no stream has written are zeros, because the client does not map the arena.
    assert read(rank, lease_id=lease.lease_id)[1] == b"xx\0\0" + b"x" * (lease.size_bytes - 4)
    damaged = seal(0, b"xx")
    damaged.data = b"xy"
    for size, sent, code, named in [
        (5, [seal(0, b"xx")], CODE.INVALID_ARGUMENT, "the stream ended 3 bytes early"),
        (1, [seal(0, b"xx")], CODE.INVALID_ARGUMENT, "the announced 1 bytes"),
        (5, [seal(0, b"")], CODE.INVALID_ARGUMENT, "a chunk of 0 bytes"),
        (5, [seal(1, b"xx")], CODE.INVALID_ARGUMENT, "must begin at byte 0, not at byte 1"),
        (5, [seal(0, b"xx"), seal(1, b"xx")], CODE.INVALID_ARGUMENT, "must begin at byte 2, not at byte 1"),
        (2, [damaged], CODE.DATA_LOSS, "bytes [0, 2) of lease"),
    ]:
        writing = Writing(rank, lease.lease_id, size)
        for chunk in sent:
            writing.send(chunk)
        writing.half_close()
        with refused(code, named):
            list(writing.responses)
    with refused(CODE.INVALID_ARGUMENT, f"leave the lease of {lease.size_bytes} bytes"):
        write(rank, lease.lease_id, b"xx", first_byte=lease.size_bytes - 1)
    with refused(CODE.INVALID_ARGUMENT, "leave the lease"):
        write(rank, lease.lease_id, b"xx", first_byte=(1 << 64) - 1)
    for first in [iter([pb.WriteRequest(chunk=seal(0, b"x"))]), iter([])]:
        with refused(CODE.INVALID_ARGUMENT, "first message of a write must be the header"):
            list(rank.store.Write(first, timeout=20))
    assert write(rank, lease.lease_id, b"") == 0
    rank.release(lease)
    with refused(CODE.NOT_FOUND, "is not held by this session"):
        write(rank, lease.lease_id, b"xx")
    assert leased_bytes(rank, reading) == before


def test_a_lease_that_ends_while_it_is_written_takes_no_more_bytes(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    lease = rank.acquire("block.0", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    writing = Writing(rank, lease.lease_id, lease.size_bytes)
    writing.send(seal(0, b"\x01" * 16))
    while leased_bytes(rank, lease)[:16] != b"\x01" * 16:
        pass
    rank.release(lease)
    writing.send(seal(16, b"\x02" * 16))
    with refused(CODE.FAILED_PRECONDITION, "ended while its bytes were streamed"):
        list(writing.responses)
    writing.half_close()
    assert leased_bytes(rank, lease)[16:32] != b"\x02" * 16


def test_a_lease_that_ends_while_it_is_read_gives_no_more_bytes(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    lease = rank.acquire("block.0", Kind.PARAM, pb.LEASE_MODE_READ)
    reading = Reading(rank, lease_id=lease.lease_id, credit_bytes=16)
    reading.header()
    chunks = reading.chunks()
    assert len(next(chunks).data) == 16
    rank.release(lease)
    reading.grant(16)
    with refused(CODE.FAILED_PRECONDITION, "ended while its bytes were streamed"):
        next(chunks)
    reading.half_close()


def raw(tensor: torch.Tensor) -> bytes:
    """Return the tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
