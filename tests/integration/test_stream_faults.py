"""Transfers whose clients or connections fail: they go on from the byte that they had reached, or end, and do no harm
to other transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
import torch

from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind
from tests.integration.support.daemon import CHANNEL_OPTIONS, MIB, Daemon, admin_of
from tests.integration.support.store_client import Clients, Rank, refused
from tests.integration.support.stream_client import Reading, Writing, read
from tests.integration.support.tampering import CutAfter, Tamper, TamperingProxy, flip_a_bit_of
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.channel import open_channel
from trainer_client.client.transport.streams import Streams
from trainer_client.errors import DataLossError

CODE = grpc.StatusCode
STALL_SECONDS = 2.5
BUDGET = 8 * MIB
SLAB_BYTES = 8 * MIB
# By default gRPC's clients buffer some MiB of each stream. With these options they buffer little, so that a stream
# without a reader stalls soon.
SMALL_WINDOWS = (*CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))


@pytest.fixture(scope="module")
def strict_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a small budget for streams and a short stall timeout."""
    config = {"stream_budget": BUDGET, "stream_stall_seconds": STALL_SECONDS, "host_budget": "64MiB"}
    with Daemon(tmp_path_factory.mktemp("strict") / "state", config) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@pytest.fixture
def rank(strict_daemon: Daemon, job: str) -> Iterator[Rank]:
    """A rank of a job with one slab of random values. The job is deleted afterwards."""
    with Clients(strict_daemon.address) as clients:
        yield clients.rank(Layout(name=job, numels=(SLAB_BYTES // 4,), groups=("a",), with_skips=False)).begin()
    deadline = time.monotonic() + 10
    with admin_of(strict_daemon.address) as admin:
        while any(found.sessions for found in admin.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        admin.DeleteJob(admin_pb.DeleteJobRequest(job=job), timeout=10)


@contextmanager
def streams_through(daemon: Daemon, rank: Rank, path: Path, tamper: Tamper) -> Iterator[Streams]:
    """Yield the training library's streams through a tampering proxy. The session itself does not use the proxy."""
    with TamperingProxy(path, daemon.socket, tamper) as proxy, open_channel(proxy.address) as channel:
        yield Streams(channel, rank.session_id, lambda: None)


def transfer_bytes(daemon: Daemon) -> int:
    with admin_of(daemon.address) as admin:
        reading = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10)
    assert reading.transfer_budget_bytes == BUDGET
    return reading.transfer_bytes


def anonymous_bytes(daemon: Daemon) -> int:
    """Return the daemon's memory that is neither the arena nor a file."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def test_a_read_goes_on_where_the_connection_broke(strict_daemon: Daemon, rank: Rank, tmp_path: Path) -> None:
    lease = rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
    cut = CutAfter(3 * MIB, times=2)
    with streams_through(strict_daemon, rank, tmp_path / "p.sock", cut) as streams:
        data = torch.empty(lease.size_bytes, dtype=torch.uint8)
        header = streams.read(pb.ReadRequest.Open(lease_id=lease.lease_id), data.numpy().data, 30)
    assert cut.times == 0
    assert (header.version, header.dtype) == (0, pb.DTYPE_FLOAT32)
    assert torch.equal(data.view(torch.float32), rank.reference.initial("a", 0))


def test_a_write_goes_on_where_the_connection_broke(strict_daemon: Daemon, rank: Rank, tmp_path: Path) -> None:
    lease = rank.acquire("a", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    gradient = rank.reference.gradient(1, "a", 0)
    cut = CutAfter(3 * MIB, times=2)
    with streams_through(strict_daemon, rank, tmp_path / "p.sock", cut) as streams:
        streams.write(lease.lease_id, gradient.view(torch.uint8).numpy().data, 30)
    assert cut.times == 0
    assert torch.equal(rank.tensor(lease, Kind.GRAD), gradient)


def test_damage_on_the_way_is_found_and_named(strict_daemon: Daemon, rank: Rank, tmp_path: Path) -> None:
    values = torch.zeros(SLAB_BYTES, dtype=torch.uint8)
    values[:MIB] = 0xAB
    gradient = rank.acquire("a", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    before = rank.tensor(gradient, Kind.GRAD).clone()
    damage = flip_a_bit_of(b"\xab" * 64)
    with (
        streams_through(strict_daemon, rank, tmp_path / "p.sock", damage) as streams,
        pytest.raises(DataLossError, match=r"bytes \[0, 16384\) of lease \d+ .* were damaged on their way"),
    ):
        streams.write(gradient.lease_id, values.numpy().data, 30)
    assert torch.equal(rank.tensor(gradient, Kind.GRAD), before)
    rank.tensor(gradient, Kind.GRAD).copy_(values.view(torch.float32))
    rank.apply(1, gradient, group="a")
    rank.commit(1)
    lease = rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
    pattern = bytes(rank.tensor(lease, Kind.PARAM).view(torch.uint8)[:64].numpy())
    with (
        streams_through(strict_daemon, rank, tmp_path / "q.sock", flip_a_bit_of(pattern)) as streams,
        pytest.raises(DataLossError, match=r"bytes \[0, \d+\) of a read were damaged on their way"),
    ):
        streams.read(pb.ReadRequest.Open(lease_id=lease.lease_id), values.numpy().data, 30)


def test_dead_readers_neither_stall_others_nor_grow_the_daemon(strict_daemon: Daemon, rank: Rank) -> None:
    """Two hundred readers grant all credit and read nothing, while others read. Together they ask for more than the
    budget."""
    lease = rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
    expected = bytes(rank.tensor(lease, Kind.PARAM).view(torch.uint8).numpy())
    assert read(rank, lease_id=lease.lease_id)[1] == expected
    before = anonymous_bytes(strict_daemon)
    held = 0
    with ExitStack() as cleanup:
        for number in range(200):
            if number % 20 == 0:
                channel = cleanup.enter_context(channel_to(strict_daemon.address, options=SMALL_WINDOWS))
            dead = Reading(
                rank, pb_grpc.ParameterStoreStub(channel), lease_id=lease.lease_id, credit_bytes=SLAB_BYTES, seconds=60
            )
            cleanup.callback(dead.cancel)
            if number % 25 == 0:
                assert read(rank, lease_id=lease.lease_id)[1] == expected
                held = max(held, transfer_bytes(strict_daemon))
        for _ in range(3):
            assert read(rank, lease_id=lease.lease_id)[1] == expected
            held = max(held, transfer_bytes(strict_daemon))
        grown = anonymous_bytes(strict_daemon) - before
    print(f"{held} bytes held at most, the daemon has grown by {grown} bytes")
    assert 0 < held <= BUDGET
    # Two hundred whole chunks would be 200 MiB. The daemon cannot bound the memory that gRPC uses for a connection.
    assert grown < BUDGET + 24 * MIB
    _wait_until_nothing_is_held(strict_daemon)


def test_a_reader_that_begins_to_read_late_is_told_to_come_again(strict_daemon: Daemon, rank: Rank) -> None:
    lease = rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
    with channel_to(strict_daemon.address, options=SMALL_WINDOWS) as channel:
        reading = Reading(
            rank, pb_grpc.ParameterStoreStub(channel), lease_id=lease.lease_id, credit_bytes=SLAB_BYTES, seconds=30
        )
        reading.header()
        time.sleep(2 * STALL_SECONDS)
        got = bytearray()
        with refused(CODE.DEADLINE_EXCEEDED, "bytes have not moved for", "from the byte that you have"):
            for chunk in reading.chunks():
                got += chunk.data
        reading.half_close()
    expected = bytes(rank.tensor(lease, Kind.PARAM).view(torch.uint8).numpy())
    assert got == expected[: len(got)]
    _, rest = read(rank, lease_id=lease.lease_id, first_byte=len(got))
    assert got + rest == expected


def test_writers_that_announce_and_never_send_are_ended(strict_daemon: Daemon, rank: Rank) -> None:
    lease = rank.acquire("a", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    idle = [Writing(rank, lease.lease_id, SLAB_BYTES, seconds=30) for _ in range(50)]
    assert all(next(writing.responses).credit_bytes > 0 for writing in idle)
    assert 0 < transfer_bytes(strict_daemon) <= BUDGET
    for writing in idle:
        with refused(CODE.DEADLINE_EXCEEDED, "bytes have not moved for"):
            list(writing.responses)
        writing.half_close()
    assert transfer_bytes(strict_daemon) == 0


def test_the_end_of_a_session_ends_its_transfers(strict_daemon: Daemon, rank: Rank) -> None:
    """Transfers that wait for credit end too, although no credit would ever wake them."""
    with Clients(strict_daemon.address) as others:
        other = others.client()
        lease = rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
        reading = Reading(rank, other.store, lease_id=lease.lease_id, credit_bytes=1)
        reading.header()
        assert len(next(reading.chunks()).data) == 1
        closing = threading.Thread(target=rank.close)
        closing.start()
        with refused(CODE.NOT_FOUND, "the session ended while its bytes were streamed"):
            next(reading.chunks())
        reading.half_close()
        closing.join()


def _wait_until_nothing_is_held(daemon: Daemon) -> None:
    deadline = time.monotonic() + 10
    while held := transfer_bytes(daemon):
        assert time.monotonic() < deadline, f"{held} bytes are still held"
        time.sleep(0.01)
