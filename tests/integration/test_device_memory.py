"""The memory of their devices that sessions offer, as the daemon sees it: leases on copies, versions, and the end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind, TierName
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.forked import Forked
from tests.integration.support.store_client import Clients, Rank, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon of this file alone.

    Once a session has offered memory, its daemon shows the gpu tier until it ends, and tests of other files compare the
    tiers of the shared daemon.
    """
    with Daemon(tmp_path_factory.mktemp("store") / "state", {"nvme_budget": "128MiB"}) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log, daemon.log


def gpu_tier(daemon: Daemon) -> admin_pb.TierInfo:
    with admin_of(daemon.address) as admin:
        found = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10).tiers
    return next((tier for tier in found if tier.tier == pb.TIER_GPU), admin_pb.TierInfo())


def read(rank: Rank, groups: Sequence[str], as_of: int, next_use: int | None = None) -> list[pb.Lease]:
    """Lease parameters as a gather does."""
    wants = [
        pb.AcquireLeasesRequest.Want(
            slab=pb.SlabName(group=group, kind=pb.KIND_PARAM),
            mode=pb.LEASE_MODE_READ,
            as_of_step=as_of,
            device=pb.DeviceUse(next_use=next_use),
        )
        for group in groups
    ]
    return list(rank.call("AcquireLeases", wants=wants).leases)


def release(rank: Rank, leases: Sequence[pb.Lease], *, kept: bool = True) -> None:
    releases: list[Any] = [
        pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id, kept=kept and lease.HasField("keep"))
        for lease in leases
    ]
    rank.call("ReleaseLeases", releases=releases)


def has_copies(leases: Sequence[pb.Lease]) -> list[bool]:
    return [lease.HasField("device") for lease in leases]


def test_a_copy_is_leased_as_long_as_its_bytes_are_the_newest(clients: Clients, daemon: Daemon, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    assert not any(lease.HasField("keep") for lease in read(rank, rank.groups, 0)), "no memory was offered"
    rank.call("OfferDeviceMemory", size_bytes=MIB, device="lag:0")
    first = read(rank, rank.groups, 0)
    assert has_copies(first) == [False, False]
    assert all(lease.HasField("keep") for lease in first)
    # While the client copies, there is no copy yet; and one that it has not made does not count.
    assert has_copies(read(rank, rank.groups, 0)) == [False, False]
    release(rank, first[:1])
    release(rank, first[1:], kept=False)
    again = read(rank, rank.groups, 0)
    assert has_copies(again) == [True, False]
    assert (again[0].device, again[0].size_bytes) == (first[0].keep, first[0].size_bytes)
    release(rank, again)
    again = read(rank, rank.groups, 0)
    assert has_copies(again) == [True, True]
    assert gpu_tier(daemon).leased_bytes == gpu_tier(daemon).used_bytes > 0
    release(rank, again)
    rank.train(1, 1)
    newer = read(rank, rank.groups, 1)
    assert has_copies(newer) == [False, False]
    assert [lease.version for lease in newer] == [1, 1]
    release(rank, newer)
    assert has_copies(read(rank, rank.groups, 1)) == [True, True]
    rank.assert_at(1)


def test_a_copy_of_the_committed_step_is_leased_while_the_update_of_the_next_one_waits(
    clients: Clients, job: str
) -> None:
    """The update of bytes that only host memory has waits for the commit."""
    layout = Layout(name=job, weights=TierName.HOST, moments=TierName.HOST, every_steps=2)
    rank = clients.rank(layout).begin()
    rank.call("OfferDeviceMemory", size_bytes=MIB, device="lag:0")
    release(rank, read(rank, rank.groups, 0))
    rank.hand_over(1)
    during = read(rank, rank.groups, 0)
    assert has_copies(during) == [True, True]
    release(rank, during)
    rank.commit(1)
    assert has_copies(read(rank, rank.groups, 1)) == [False, False]
    rank.assert_at(1)


@pytest.mark.parametrize("way", ["withdrawn", "rolled back"])
def test_bytes_that_are_undone_are_no_copies(clients: Clients, job: str, way: str) -> None:
    """The step that is made again has the same number, and may have other bytes."""
    rank = clients.rank(Layout(name=job)).begin()
    rank.call("OfferDeviceMemory", size_bytes=MIB, device="lag:0")
    rank.train(1, 2)
    group = rank.groups[0]
    gradient = rank.acquire(group, Kind.GRAD, pb.LEASE_MODE_WRITE, step=3)
    rank.apply(3, gradient, provisional=True, group=group)
    undone = read(rank, [group], 3)
    assert [lease.version for lease in undone] == [3]
    release(rank, undone)
    undone = read(rank, [group], 3)
    assert has_copies(undone) == [True]
    release(rank, undone)
    if way == "withdrawn":
        rank.call("WithdrawUpdates", step=3, groups=[group])
    else:
        rank.call("RollBack", step=2)
    before = read(rank, rank.groups, 2)
    assert has_copies(before) == [False, False]
    assert [lease.version for lease in before] == [2, 2]
    release(rank, before)
    rank.release(gradient)
    rank.train(3, 3)
    assert has_copies(read(rank, rank.groups, 3)) == [False, False]
    rank.assert_at(3)


def test_less_memory_is_acknowledged_when_no_lease_lies_beyond_it(clients: Clients, daemon: Daemon, job: str) -> None:
    rank = clients.rank(Layout(name=job)).begin()
    rank.call("OfferDeviceMemory", size_bytes=MIB, device="lag:0")
    release(rank, read(rank, rank.groups, 0))
    held = read(rank, rank.groups, 0)
    # The lease on the second copy lies beyond the room for one.
    room = held[1].device.offset
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        rank.call("OfferDeviceMemory", size_bytes=room, device="lag:0", seconds=0.3)
    release(rank, held)
    rank.call("OfferDeviceMemory", size_bytes=room, device="lag:0")
    assert (gpu_tier(daemon).used_bytes, gpu_tier(daemon).budget_bytes) == (room, room)
    assert has_copies(read(rank, rank.groups, 0)) == [True, False]


def test_what_a_killed_client_has_offered_is_forgotten(
    clients: Clients, daemon: Daemon, job: str, tmp_path: Path
) -> None:
    clients.rank(Layout(name=job), run_id="first").begin().close()
    arguments = [daemon.address, job]
    module = "tests.integration.support.device_client"
    log = tmp_path / "client.log"
    killed = Forked(module, arguments, environment=os.environ, log=log)
    try:
        wait_until(lambda: log.exists() and "leased" in log.read_text())
        tier = gpu_tier(daemon)
        assert tier.budget_bytes == MIB
        assert tier.leased_bytes == tier.used_bytes
        assert "lag:0 of to be killed" in tier.detail
        with admin_of(daemon.address) as admin:
            (session,) = admin.ListSessions(admin_pb.ListSessionsRequest(), timeout=10).sessions
            account = admin.GetAccounts(admin_pb.GetAccountsRequest(), timeout=20).accounts[0]
        assert (session.device_bytes, session.device_budget_bytes) == (tier.used_bytes, MIB)
        assert (account.tier, account.used_bytes, account.settled) == (pb.TIER_GPU, tier.used_bytes, True)
        shown = CliRunner().invoke(app, ["tiers", "--address", daemon.address]).output
        assert "gpu" in shown
    finally:
        killed.kill()
        killed.wait()
    wait_until(lambda: gpu_tier(daemon).budget_bytes == 0)
    assert (gpu_tier(daemon).used_bytes, gpu_tier(daemon).leased_bytes) == (0, 0)
    rank = clients.rank(Layout(name=job), run_id="second")
    rank.resume()
    rank.train(1, 1)
    rank.assert_at(1)


@pytest.mark.parametrize(("fields", "named"), [({"device": ""}, "device"), ({"size_bytes": 1 << 63}, "size_bytes")])
def test_an_offer_that_makes_no_sense_is_refused(clients: Clients, fields: dict[str, Any], named: str) -> None:
    client = clients.client()
    changed: dict[str, Any] = {"device": "lag:0", "size_bytes": 1} | fields
    with refused(grpc.StatusCode.INVALID_ARGUMENT, named):
        client.call("OfferDeviceMemory", **changed)
