"""Budgets and disks that are too small: the daemon names the key and the figure to set, loses no data, and works with
that figure."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from paramserver import vocabulary
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import TierName
from tests.integration.support.daemon import MIB, Daemon, admin_of, tiers
from tests.integration.support.mounts import fill, small_disk
from tests.integration.support.store_client import Clients, Rank, refused
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
# This job has 6.3 MB of states on its tier and 2 MB of gradients.
BIG = Layout(numels=(65_537,), groups=tuple("abcdefgh"), with_skips=False)


def refusal(rank: Rank) -> str:
    """Register a rank's shards, and return the message with which the daemon refuses because a budget is too small."""
    rank.open()
    with pytest.raises(grpc.RpcError) as caught:
        rank.register()
    assert isinstance(caught.value, grpc.Call) and caught.value.code() is CODE.RESOURCE_EXHAUSTED
    return caught.value.details() or ""


@pytest.mark.parametrize(
    ("key", "tier"),
    [("host_budget", TierName.HOST), ("host_budget", TierName.NVME), ("nvme_budget", TierName.NVME)],
)
def test_a_budget_too_small_is_refused_with_the_figure_to_set_and_that_figure_works(
    tmp_path: Path, key: str, tier: TierName
) -> None:
    layout = Layout(numels=BIG.numels, groups=BIG.groups, with_skips=False, weights=tier, moments=tier)
    small = 3584 << 10
    with Daemon(tmp_path / "state", {key: small}) as daemon:
        with Clients(daemon.address) as clients:
            told = refusal(clients.rank(layout))
        assert f"{key} 3.5 MiB is too small" in told
        found = re.search(rf"raise {key} to at least (\d+MiB)[, ]", told)
        assert found is not None, told
        assert daemon.stop() == 0
    with Daemon(tmp_path / "state", {key: found[1]}) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(layout).begin()
        rank.train(1, 3)
        rank.assert_at(3)


def test_more_host_memory_than_there_is_is_refused_at_the_start(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state", {"host_budget": "1000TiB"}, wait=False) as daemon:
        assert daemon.wait() == 1
        assert "host_budget: 1000.0 TiB of shared memory" in daemon.log and "lower host_budget" in daemon.log
        assert "Traceback" not in daemon.log


def test_a_lease_that_others_leave_no_room_for_is_refused_in_time_and_granted_once_one_is_returned(
    tmp_path: Path,
) -> None:
    config = {"host_budget": 6 * MIB, "admission_timeout_seconds": 0.2}
    with Daemon(tmp_path / "state", config) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(BIG).begin()
        slabs = [(group, kind) for kind in BIG.kinds for group in BIG.groups]
        leases = []
        with refused(CODE.RESOURCE_EXHAUSTED, "host_budget 6.0 MiB had no room for", "for 0.2 s", "that are leased"):
            for group, kind in slabs:
                leases.append(rank.acquire(group, kind, pb.LEASE_MODE_READ))
        # One of these two wants could be granted and the other could not. The daemon grants both or none.
        leased = tiers(daemon.address)[0].leased_bytes
        wants = [
            pb.AcquireLeasesRequest.Want(
                slab=pb.SlabName(group=group, kind=vocabulary.KIND_TO_WIRE[kind]), mode=pb.LEASE_MODE_READ
            )
            for group, kind in (slabs[0], slabs[len(leases)])
        ]
        with refused(
            CODE.RESOURCE_EXHAUSTED, "return leases sooner, or raise host_budget or admission_timeout_seconds"
        ):
            rank.call("AcquireLeases", wants=wants)
        assert tiers(daemon.address)[0].leased_bytes == leased > 2 * MIB
        rank.release(leases.pop())
        leases += rank.call("AcquireLeases", wants=wants).leases
        for lease in leases:
            rank.release(lease)
        rank.assert_at(0)


def test_memory_that_the_machine_may_not_grant_is_a_wish_and_what_was_granted_is_told(tmp_path: Path) -> None:
    # The budget is not a multiple of 2 MiB, so a daemon with huge pages rounds it down.
    config = {"host_budget": 17 * MIB}
    with Daemon(tmp_path / "state", config, flags=["--huge-pages", "--lock-memory"]) as daemon:
        what, *granted = tiers(daemon.address)[0].detail.split(", ")
        assert what == "shared memory"
        assert daemon.log.count("huge_pages: cannot allocate") == (0 if "huge pages" in granted else 1)
        assert daemon.log.count("lock_memory: cannot lock") == (0 if "locked" in granted else 1)
        assert tiers(daemon.address)[0].budget_bytes == (16 if "huge pages" in granted else 17) * MIB
        with Clients(daemon.address) as clients:
            rank = clients.rank(Layout()).begin()
            rank.train(1, 2)
            rank.assert_at(2)
        assert daemon.stop() == 0


def test_a_disk_that_cannot_hold_the_job_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 8 * MIB) as disk,
        Daemon(disk / "state", {"nvme_budget": "1GiB"}) as daemon,
        Clients(daemon.address) as clients,
    ):
        warned = f"nvme_budget 1.0 GiB is more than {disk}/state/data.0 can have: "
        assert warned in daemon.log and "and what is free beside them are 7." in daemon.log
        with admin_of(daemon.address) as admin:
            events = admin.ListEvents(admin_pb.ListEventsRequest(kinds=["tier"]), timeout=10).events
        assert [event.subject for event in events if event.text.startswith(warned)] == ["nvme"]
        told = refusal(clients.rank(BIG))
        assert f"{disk}/state/data.0: No space left on device; free space there or lower nvme_budget" in told
        assert tiers(daemon.address)[1].used_bytes == 0
        small = clients.rank(Layout(name="small", numels=(16,), groups=("a",)))
        small.begin()
        small.train(1, 2)
        small.assert_at(2)


def test_a_full_disk_stops_the_step_not_the_daemon_and_training_goes_on_after_making_room(tmp_path: Path) -> None:
    layout = Layout(numels=(20_000, 17))
    # These client states are so large that the catalog must grow. The daemon reserves room for tensor data, but not for
    # the catalog.
    state = bytes(300_000)
    with (
        small_disk(tmp_path / "disk", 16 * MIB) as disk,
        Daemon(disk / "state", {"nvme_budget": "4MiB"}) as daemon,
        Clients(daemon.address) as clients,
    ):
        rank = clients.rank(layout).begin()
        rank.train(1, 2)
        filler = fill(disk)
        rank.hand_over(3)
        with refused(CODE.RESOURCE_EXHAUSTED, f"the file system of {disk}/state/catalog.sqlite is full", "intact"):
            for _ in range(20):
                rank.call("CommitStep", step=3, client_state=state)
        rank.call("RollBack", step=2)
        rank.assert_at(2)
        # A second attempt while the disk is full fails in the same way. The failed attempts use up no room.
        rank.hand_over(3)
        with refused(CODE.RESOURCE_EXHAUSTED, "is full; free space there"):
            rank.call("CommitStep", step=3, client_state=state)
        # A crash of the daemon while the disk is full loses no committed step.
        daemon.kill()
        filler.unlink()
        with Daemon(disk / "state", {"nvme_budget": "4MiB"}) as again, Clients(again.address) as others:
            resumed = others.rank(layout, run_id="again")
            assert resumed.resume() == 2
            resumed.assert_at(2)
            resumed.train(3, 4)
            filler = fill(disk)
            resumed.hand_over(5)
            with refused(CODE.RESOURCE_EXHAUSTED):
                resumed.call("CommitStep", step=5, client_state=state)
            filler.unlink()
            resumed.call("RollBack", step=4)
            resumed.train(5, 6)
            resumed.assert_at(6)
