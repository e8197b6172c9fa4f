"""Readers over the wire: sessions without a training run list the stored tensors, hold a step of them, and follow the
job's commits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch

from paramserver import vocabulary
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import DType, Kind
from tests.integration.support.daemon import Daemon, admin_of, tiers
from tests.integration.support.store_client import Client, Clients, Rank, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
HUGE = (1 << 64) - 1


def layout_of(job: str) -> Layout:
    return Layout(name=job, precision=DType.BFLOAT16)


def tensor_range(fqn: str, kind: Kind, reader_id: int, *, offset: int = 0, numel: int) -> pb.TensorRange:
    return pb.TensorRange(fqn=fqn, kind=vocabulary.KIND_TO_WIRE[kind], offset=offset, numel=numel, reader_id=reader_id)


def lease_range(client: Client, source: pb.TensorRange, mode: pb.LeaseMode = pb.LEASE_MODE_READ) -> pb.Lease:
    want = pb.AcquireLeasesRequest.Want(range=source, mode=mode)
    (lease,) = client.call("AcquireLeases", wants=[want]).leases
    assert isinstance(lease, pb.Lease)
    return lease


def read(client: Client, source: pb.TensorRange, dtype: DType) -> torch.Tensor:
    """Lease a range, return its values as a tensor, and release the lease."""
    lease = lease_range(client, source)
    assert lease.size_bytes == source.numel * dtype.itemsize
    leased = memoryview(client.map_arena())[lease.arena_offset :][: lease.size_bytes]
    tensor = torch.frombuffer(leased, dtype=dtype.torch).clone()
    client.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id)])
    return tensor


def assert_reads(client: Client, opened: pb.OpenReaderResponse, rank: Rank) -> None:
    """Assert that every tensor of every kind equals torch's after the reader's step."""
    for (_, fqn, kind), expected in rank.reference.states(opened.step).items():
        source = tensor_range(fqn, kind, opened.reader_id, numel=len(expected))
        assert torch.equal(read(client, source, rank.layout.dtype(kind)), expected), f"{fqn} {kind}"


def test_a_session_without_a_job_reads_what_another_trains_step_by_step(clients: Clients, job: str) -> None:
    rank = clients.rank(layout_of(job)).begin()
    client = clients.client(name="reader")
    first = client.call("OpenReader", job=job)
    rank.train(1, 2)
    second = client.call("OpenReader", job=job)
    rank.train(3, 3)
    third = client.call("OpenReader", job=job, step=3)
    assert [first.step, second.step, third.step] == [0, 2, 3]
    for opened in (first, second, third):
        assert_reads(client, opened, rank)
    part = tensor_range("block.1.weight.2", Kind.MASTER, second.reader_id, offset=11, numel=7000)
    expected = rank.reference.states(2)["block.1", "block.1.weight.2", Kind.MASTER]
    assert torch.equal(read(client, part, DType.FLOAT32), expected[11:7011])
    client.call("CloseReader", reader_id=second.reader_id)
    with refused(CODE.NOT_FOUND, f"reader {second.reader_id} is not open in this session"):
        lease_range(client, part)
    with refused(CODE.NOT_FOUND, "does not hold step 1"):
        client.call("OpenReader", job=job, step=1)


def test_what_a_session_held_is_free_at_its_end(daemon: Daemon, clients: Clients, job: str) -> None:
    rank = clients.rank(layout_of(job)).begin()
    rank.train(1, 1)
    before = [(tier.used_bytes, tier.leased_bytes) for tier in tiers(daemon.address)]
    client = clients.client(name="reader")
    opened = client.call("OpenReader", job=job)
    lease = lease_range(client, tensor_range("block.0.weight.0", Kind.MASTER, opened.reader_id, numel=30_003))
    assert tiers(daemon.address)[0].leased_bytes == before[0][1] + -(-lease.size_bytes // 4096) * 4096
    rank.train(2, 2)
    client.close()
    rank.train(3, 3)
    with admin_of(daemon.address) as admin:
        while admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10).sessions > 1:
            time.sleep(0.01)
    # The memory of an ended session is freed bit by bit.
    wait_until(lambda: [(tier.used_bytes, tier.leased_bytes) for tier in tiers(daemon.address)] == before)


def test_jobs_and_tensors_are_listed_with_what_this_store_holds(clients: Clients, job: str) -> None:
    layout = layout_of(job)
    ranks = [clients.rank(layout, rank=rank, ranks=2) for rank in range(2)]
    # Only one of the job's two ranks is attached to this store, so the store has one of the two groups.
    ranks[0].open(attached_ranks=1)
    ranks[0].register()
    client = clients.client()
    (stored,) = client.call("ListStoredJobs").jobs
    assert (stored.name, stored.world_size, stored.HasField("committed_step")) == (job, 2, False)
    ranks[0].stage_all()
    ranks[0].commit(0)
    (stored,) = client.call("ListStoredJobs").jobs
    assert (stored.committed_step, stored.durable) == (0, True)
    tensors = client.call("ListStoredTensors", job=job).tensors
    assert [t.parameter.fqn for t in tensors] == [f"block.0.weight.{i}" for i in range(3)]
    assert [list(t.parameter.shape) for t in tensors] == [[30_003], [17], [12_000]]
    assert [(r.offset, r.numel) for t in tensors for r in t.held] == [(0, 30_003), (0, 17), (0, 12_000)]
    assert [(k.kind, k.dtype) for k in tensors[0].kinds] == [
        (pb.KIND_PARAM, pb.DTYPE_BFLOAT16),
        (pb.KIND_MASTER, pb.DTYPE_FLOAT32),
        (pb.KIND_EXP_AVG, pb.DTYPE_FLOAT32),
        (pb.KIND_EXP_AVG_SQ, pb.DTYPE_FLOAT32),
    ]
    first = client.call("ListStoredTensors", job=job, page_size=2)
    rest = client.call("ListStoredTensors", job=job, page_size=2, page_token=first.next_page_token)
    assert first.next_page_token and not rest.next_page_token
    assert [*first.tensors, *rest.tensors] == list(tensors)
    (one,) = client.call("ListStoredTensors", job=job, fqn_prefix="block.0.weight.1").tensors
    assert one == tensors[1]
    with refused(CODE.NOT_FOUND, "there is no job 'nothing'"):
        client.call("ListStoredTensors", job="nothing")
    with refused(CODE.INVALID_ARGUMENT, "page_token 'x'"):
        client.call("ListStoredTensors", job=job, page_token="x")


def steps(watch: Iterator[pb.WatchJobResponse], count: int) -> list[int]:
    return [next(watch).newest.step for _ in range(count)]


def test_a_watcher_is_told_the_newest_step_and_then_each_commit_until_the_job_is_deleted(
    daemon: Daemon, clients: Clients, job: str
) -> None:
    client = clients.client()
    with refused(CODE.NOT_FOUND, f"there is no job {job!r}"):
        next(watch_of(client, job))
    rank = clients.rank(layout_of(job))
    rank.open()
    early = watch_of(client, job)
    rank.register()
    rank.stage_all()
    rank.commit(0)
    assert steps(early, 1) == [0]
    rank.train(1, 2)
    late = watch_of(client, job)
    assert steps(late, 1) == [2]
    rank.train(3, 3)
    assert steps(late, 1) == [3]
    # The client did not read while steps 1 to 3 were committed. The watch may skip steps, but the steps that it yields
    # only increase.
    seen = steps(early, 1)
    while seen[-1] < 3:
        seen += steps(early, 1)
    assert seen == sorted(set(seen))
    rank.close()
    with admin_of(daemon.address) as admin:
        while admin.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs[0].sessions:
            time.sleep(0.01)
        admin.DeleteJob(admin_pb.DeleteJobRequest(job=job), timeout=10)
    for watch in (early, late):
        with refused(CODE.NOT_FOUND, f"job {job!r} was deleted"):
            next(watch)


def watch_of(client: Client, job: str) -> Iterator[pb.WatchJobResponse]:
    watch: Iterator[pb.WatchJobResponse] = client.store.WatchJob(
        pb.WatchJobRequest(session_id=client.session_id, job=job), timeout=20
    )
    return watch


def test_bytes_are_put_at_any_step(clients: Clients, job: str) -> None:
    rank = clients.rank(layout_of(job)).begin()
    group = rank.groups[0]
    lease = rank.acquire(group, Kind.PARAM, pb.LEASE_MODE_WRITE, step=1)
    rank.tensor(lease, Kind.PARAM).fill_(1.5)
    rank.release(lease, publish=True)
    given_up = rank.acquire(group, Kind.MASTER, pb.LEASE_MODE_WRITE, step=1)
    rank.release(given_up)
    with refused(CODE.FAILED_PRECONDITION, "was put in step 1 already"):
        rank.acquire(group, Kind.PARAM, pb.LEASE_MODE_WRITE, step=1)
    gradient = rank.acquire(group, Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)
    with refused(CODE.FAILED_PRECONDITION, "was updated in step 1 already, or a part of it was put"):
        rank.apply(1, gradient, group=group)
    rank.release(gradient)
    rank.commit(1)
    read_back = rank.acquire(group, Kind.PARAM, pb.LEASE_MODE_READ)
    assert read_back.version == 1
    assert (rank.tensor(read_back, Kind.PARAM) == 1.5).all()
    rank.release(read_back)
    rank.groups = rank.groups[1:]
    rank.assert_at(0)


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"reader_id": 77}, CODE.NOT_FOUND, "reader 77 is not open"),
        ({"reader_id": 0}, CODE.NOT_FOUND, "reader 0 is not open"),
        ({"fqn": "nothing"}, CODE.NOT_FOUND, "no element 0 of 'nothing'"),
        ({"kind": 77}, CODE.INVALID_ARGUMENT, "kind has the value 77"),
        ({"kind": pb.KIND_GRAD}, CODE.NOT_FOUND, "has no slab of kind grad"),
        ({"numel": 0}, CODE.INVALID_ARGUMENT, "is no range"),
        ({"numel": 18}, CODE.NOT_FOUND, "no element 17"),
        ({"offset": HUGE}, CODE.INVALID_ARGUMENT, "is no range"),
        ({"numel": 1 << 48}, CODE.NOT_FOUND, "no element 17"),
    ],
)
def test_a_hostile_range_is_refused(
    clients: Clients, job: str, changes: dict[str, Any], code: grpc.StatusCode, named: str
) -> None:
    rank = clients.rank(Layout(name=job, numels=(17,), groups=("g",))).begin()
    opened = rank.call("OpenReader", job=job)
    fields = {"fqn": "g.weight.0", "kind": pb.KIND_PARAM, "offset": 0, "numel": 17, "reader_id": opened.reader_id}
    source = pb.TensorRange(**fields)
    for mode in (pb.LEASE_MODE_WRITE, pb.LEASE_MODE_UNSPECIFIED):
        with refused(CODE.INVALID_ARGUMENT, "a range is leased for reading"):
            lease_range(rank, source, mode)
    with refused(code, named):
        lease_range(rank, pb.TensorRange(**(fields | changes)))
    assert_reads(rank, opened, rank)


def test_readers_of_one_step_share_the_bytes_that_they_lease(clients: Clients, job: str) -> None:
    rank = clients.rank(layout_of(job)).begin()
    first, second = clients.client(name="first"), clients.client(name="second")
    (_, fqn, kind), expected = next(iter(rank.reference.states(0).items()))

    def lease(client: Client) -> pb.Lease:
        reader_id = client.call("OpenReader", job=job).reader_id
        return lease_range(client, tensor_range(fqn, kind, reader_id, numel=len(expected)))

    leases = [lease(first), lease(second), lease(second)]
    assert len({lease.arena_offset for lease in leases}) == 1
    assert len({lease.lease_id for lease in leases}) == 3
    # The bytes stay as long as one lease on them is there, whichever session ends before.
    first.close()
    second.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release(lease_id=leases[1].lease_id)])
    rank.train(1, 1)
    newer = lease(second)
    assert newer.arena_offset != leases[2].arena_offset
    view = memoryview(second.map_arena())[leases[2].arena_offset :][: leases[2].size_bytes]
    assert torch.equal(torch.frombuffer(view, dtype=rank.layout.dtype(kind).torch).clone(), expected)
