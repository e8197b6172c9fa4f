"""A job gets at most what its quota allows, a refusal names the limit, and other jobs are not affected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind, TierName
from tests.integration.support.daemon import Daemon
from tests.integration.support.store_client import Clients, Rank, refused
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
GROUPS = ("a", "b", "c", "d")
# A group has 1 MiB of fp32 per kind. A rank needs room for three of them: the root, the unit in use, and the unit that
# is being fetched.
NUMEL = 256 << 10

QUOTAS: dict[str, Any] = {
    "default": {"sessions": 2},
    "job": [
        {"pattern": "tight-*", "host_bytes": "7MiB", "sessions": 1, "readers": 1},
        {"pattern": "small-nvme*", "nvme_bytes": "23MiB"},
        {"pattern": "small-host", "host_bytes": "5MiB"},
    ],
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = {"host_budget": "64MiB", "nvme_budget": "256MiB", "quotas": QUOTAS, "admission_timeout_seconds": 1.0}
    with Daemon(tmp_path_factory.mktemp("quotas") / "state", settings) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def layout(name: str, **fields: Any) -> Layout:
    return Layout(name=name, **({"numels": (NUMEL,), "groups": GROUPS} | fields))


def hold(rank: Rank, group: str) -> pb.Lease:
    return rank.acquire(group, Kind.PARAM, pb.LEASE_MODE_READ)


def test_sessions_of_a_job_are_counted(clients: Clients) -> None:
    fields = {"ranks": 3, "run_id": "three"}
    first, second, third = (clients.rank(layout("default"), rank=rank, **fields) for rank in range(3))
    first.open()
    second.open()
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of job 'default' allows 2 sessions, and 2 are attached"):
        third.open()
    second.close()
    # Another job has a quota of its own.
    clients.rank(layout("other")).open()


def test_what_a_job_stores_must_fit_its_quota_before_anything_is_reserved(clients: Clients) -> None:
    # The job needs three kinds of four groups of 1 MiB, twice: for the committed step and for the pending one.
    rank = clients.rank(layout("small-nvme"))
    rank.open()
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of job 'small-nvme', nvme_bytes = 23.0 MiB", "need 24.0 MiB"):
        rank.register()
    clients.rank(layout("small-nvme-2", groups=GROUPS[:3])).begin().assert_at(0)


def test_what_a_step_needs_of_the_host_must_fit_its_quota(clients: Clients) -> None:
    # A step needs room for four gradients, the root, the unit in use, and the unit that is being fetched.
    rank = clients.rank(layout("small-host"))
    rank.open()
    with refused(CODE.RESOURCE_EXHAUSTED, "host_bytes = 5.0 MiB, is too small: a step needs 7.0 MiB"):
        rank.register()


def test_leases_beyond_the_quota_wait_for_others_and_are_refused_in_the_end(clients: Clients) -> None:
    rank = clients.rank(layout("tight-1")).begin()
    leases = [hold(rank, group) for group in GROUPS]
    leases += [rank.acquire(group, Kind.EXP_AVG, pb.LEASE_MODE_READ) for group in GROUPS[:3]]
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of job 'tight-1', host_bytes = 7.0 MiB, has no room for 1.0 MiB"):
        hold(rank, "d")
    # A job at its quota does not hold up another job.
    other = clients.rank(layout("other-2")).begin()
    other.train(1, 1)
    # A lease that is returned makes room for a lease that waits.
    giving_back = threading.Timer(0.2, rank.release, [leases.pop()])
    giving_back.start()
    leases.append(hold(rank, "d"))
    giving_back.join()
    for lease in leases:
        rank.release(lease)
    rank.train(1, 2)
    rank.assert_at(2)


def test_a_batch_beyond_the_quota_leaves_no_lease(clients: Clients) -> None:
    rank = clients.rank(layout("tight-2")).begin()
    slabs = [pb.SlabName(group=group, kind=kind) for group in GROUPS for kind in (pb.KIND_PARAM, pb.KIND_EXP_AVG)]
    wants = [pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_READ) for slab in slabs]
    with refused(CODE.RESOURCE_EXHAUSTED, "has no room for 1.0 MiB: 0 B are placed on the host, 7.0 MiB are leased"):
        rank.call("AcquireLeases", wants=wants)
    assert len(rank.call("AcquireLeases", wants=wants[:7]).leases) == 7


def test_what_lives_on_the_host_counts_once_and_gradients_until_they_are_applied(clients: Clients) -> None:
    placed = layout("tight-3", groups=GROUPS[:1], weights=TierName.HOST, moments=TierName.HOST)
    rank = clients.rank(placed).begin()
    leases = [rank.acquire("a", kind, pb.LEASE_MODE_READ) for kind in placed.kinds for _ in range(4)]
    for lease in leases:
        rank.release(lease)
    rank.train(1, 3)
    rank.assert_at(3)


def test_readers_of_a_job_are_counted_and_their_ranges_too(clients: Clients) -> None:
    rank = clients.rank(layout("tight-4")).begin()
    reader = clients.client()
    opened = reader.call("OpenReader", job="tight-4")
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of job 'tight-4' allows 1 readers, and 1 are open"):
        clients.client().call("OpenReader", job="tight-4")
    wants = [
        pb.AcquireLeasesRequest.Want(
            mode=pb.LEASE_MODE_READ,
            range=pb.TensorRange(fqn=f"{group}.weight.0", kind=pb.KIND_PARAM, numel=numel, reader_id=opened.reader_id),
        )
        # Leases on the same range would share its memory.
        for numel in (NUMEL, NUMEL - 1)
        for group in GROUPS
    ]
    with refused(CODE.RESOURCE_EXHAUSTED, "the quota of job 'tight-4', host_bytes"):
        reader.call("AcquireLeases", wants=wants)
    reader.call("CloseReader", reader_id=opened.reader_id)
    clients.client().call("OpenReader", job="tight-4")
    rank.train(1, 1)


def test_quotas_that_make_no_sense_are_refused_by_their_key(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "state", {"quotas": {"default": {"host_bytes": "much"}}}, wait=False)
    assert daemon.wait() == 2
    assert "quotas.default.host_bytes = 'much'" in daemon.log
