"""Calls end in time and bytes stay whole on a network that is slow, loses packets, resets connections or is silent.

Two daemons run in network namespaces of their own, one of them behind a link that can do all that. On machines without
namespaces they have loopback addresses, and one is behind a proxy.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc
import pytest

from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from tests.faults.network import CLEAR, Link, Proxy, Weather, why_no_link
from tests.faults.remote_rank import RemoteRank
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.ranks import free_port
from tests.integration.support.store_client import Rank
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.channel import open_channel, wait_until_serving
from trainer_client.errors import StoreError, StoreTimeoutError, StoreUnavailableError

HEARTBEAT_TIMEOUT_SECONDS = 8.0
GRACE_SECONDS = 2.0
# The time in which a client notices that nothing arrives any more: gRPC's keepalive, and a new attempt to connect.
NOTICED_SECONDS = 13.0
SLACK_SECONDS = 10.0
MIB = 1 << 20
NO_LINK = why_no_link()
BLACK_HOLE = Weather(black_hole=True)
SLOW = {
    "100 ms more": Weather(delay_seconds=0.05),
    "3 % lost": Weather(loss=0.03, delay_seconds=0.002),
    "4 MiB/s": Weather(bytes_per_second=4 * MIB),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A daemon behind the network (`far`), and the daemon of the client's own node (`near`)."""

    far: Daemon
    near: Daemon
    network: Link | Proxy
    address: str

    def usage(self) -> list[tuple[int, int]]:
        """Return the used and leased bytes of the far daemon's tiers; the call does not use the network."""
        with admin_of(self.far.address) as admin:
            return [
                (tier.used_bytes, tier.leased_bytes)
                for tier in admin.GetTiers(admin_pb.GetTiersRequest(), timeout=20).tiers
            ]

    def sessions(self) -> int:
        """Return the number of sessions of the far daemon."""
        with admin_of(self.far.address) as admin:
            return int(admin.GetTiers(admin_pb.GetTiersRequest(), timeout=20).sessions)

    def wait_for_no_session(self, seconds: float) -> None:
        """Wait until the far daemon has no session; fail if it still has one after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.sessions():
            assert time.monotonic() < deadline, f"a session is still there after {seconds:g} s\n{self.far.log}"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def whole_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    config = {"heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_SECONDS, "nvme_budget": "256MiB", "host_budget": "32MiB"}
    directory = tmp_path_factory.mktemp("network")
    with ExitStack() as cleanup:
        link = cleanup.enter_context(Link()) if NO_LINK is None else None
        host, port = (link.host, 7777) if link else ("127.0.0.3", free_port("127.0.0.3"))
        listening = config | {"listen": f"{host}:{port}", "insecure": True}
        far = cleanup.enter_context(Daemon(directory / "far", listening, prefix=link.prefix if link else ()))
        near = cleanup.enter_context(Daemon(directory / "near", config, prefix=("unshare", "--net") if link else ()))
        network = link or cleanup.enter_context(Proxy((host, port)))
        place = Place(far, near, network, network.address if isinstance(network, Proxy) else f"{host}:{port}")
        wait_until_serving(place.address, 20)
        yield place
        for daemon in (far, near):
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log


@pytest.fixture
def place(whole_place: Place) -> Iterator[Place]:
    """Both daemons without jobs and an undisturbed network. After the test the far one must hold nothing of it."""
    before = whole_place.usage()
    yield whole_place
    whole_place.network.weather = CLEAR
    whole_place.wait_for_no_session(HEARTBEAT_TIMEOUT_SECONDS + GRACE_SECONDS + SLACK_SECONDS)
    for daemon in (whole_place.far, whole_place.near):
        with admin_of(daemon.address) as admin:
            for job in admin.ListJobs(admin_pb.ListJobsRequest(), timeout=20).jobs:
                admin.DeleteJob(admin_pb.DeleteJobRequest(job=job.name), timeout=20)
    # The scrubber may be reading a version of a deleted job, whose bytes are free when that read has ended.
    wait_until(lambda: whole_place.usage() == before)


def layout(numel: int = 300_001) -> Layout:
    return Layout(name="job", numels=(numel, 17), groups=("a",), with_skips=False)


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """Fail if the block takes `seconds` or longer."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_or_lossy_network_changes_no_bit(place: Place, name: str) -> None:
    if SLOW[name].loss and NO_LINK is not None:
        pytest.skip(NO_LINK)
    place.network.weather = SLOW[name]
    with RemoteRank(place.address, layout()) as rank:
        rank.begin()
        rank.train(1)
        rank.assert_at(1)


def test_a_deadline_fires_whatever_the_network_does(place: Place) -> None:
    with RemoteRank(place.address, layout()) as rank:
        rank.begin()
        place.network.weather = BLACK_HOLE
        with open_channel(place.address) as channel, ends_within(1 + SLACK_SECONDS), pytest.raises(grpc.RpcError):
            admin_grpc.StoreAdminStub(channel).GetTiers(admin_pb.GetTiersRequest(), timeout=1, wait_for_ready=True)
        place.network.weather = CLEAR
        rank.train(1)
        rank.assert_at(1)


def test_a_black_hole_of_five_seconds_is_only_a_pause(place: Place) -> None:
    with RemoteRank(place.address, layout()) as rank:
        rank.begin()
        timer = threading.Timer(5.0, lambda: setattr(place.network, "weather", CLEAR))
        gradient = rank.gradient(1, "a")
        place.network.weather = BLACK_HOLE
        timer.start()
        rank.apply(1, "a", gradient)
        rank.store.steps.commit(1, b"", 1, wait_for_copies=lambda: None).wait()
        rank.assert_at(1)
        timer.join()


def test_what_falls_into_a_black_hole_is_not_half_written(place: Place) -> None:
    """The client gets an error, the far daemon frees the client's memory, and training with the near one goes on."""
    near = Rank(place.near.address, layout(1_000))
    with RemoteRank(place.address, layout()) as rank:
        rank.begin()
        rank.train(1)
        gradient = rank.gradient(2, "a")
        place.network.weather = Weather(bytes_per_second=MIB)
        threading.Timer(0.3, lambda: setattr(place.network, "weather", BLACK_HOLE)).start()
        told = pytest.raises((StoreUnavailableError, StoreTimeoutError))
        with ends_within(NOTICED_SECONDS + HEARTBEAT_TIMEOUT_SECONDS + SLACK_SECONDS), told:
            rank.apply(2, "a", gradient)
        near.begin()
        near.train(1, 2)
        near.assert_at(2)
        near.close()
        place.wait_for_no_session(HEARTBEAT_TIMEOUT_SECONDS + GRACE_SECONDS + SLACK_SECONDS)
        assert [leased for _, leased in place.usage()] == [0, 0]
    place.network.weather = CLEAR
    with RemoteRank(place.address, layout()) as rank:
        assert rank.open()[-1].step == 1
        rank.assert_at(1)
        rank.train(2)
        rank.assert_at(2)


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_connection_that_is_reset_in_mid_transfer_is_taken_up_where_it_was(place: Place, way: str) -> None:
    host, _, port = place.address.rpartition(":")
    with Proxy((host, int(port))) as proxy, RemoteRank(proxy.address, layout(1_500_001)) as rank:
        rank.begin()
        for step in (1, 2):
            if way == "write":
                gradient = rank.gradient(step, "a")
                proxy.reset_after(2 * MIB)
                rank.apply(step, "a", gradient)
                rank.store.steps.commit(step, b"", step, wait_for_copies=lambda: None).wait()
                rank.assert_at(step)
            else:
                rank.train(step)
                proxy.reset_after(2 * MIB)
                rank.assert_at(step)
            assert proxy.resets >= step


def test_a_daemon_that_stands_still_is_noticed_and_goes_on_when_it_may(place: Place) -> None:
    with RemoteRank(place.address, layout()) as rank:
        rank.begin()
        place.far.process.send_signal(signal.SIGSTOP)
        try:
            with ends_within(2 * NOTICED_SECONDS + SLACK_SECONDS), pytest.raises(StoreError):
                rank.train(1)
        finally:
            place.far.process.send_signal(signal.SIGCONT)
    place.wait_for_no_session(HEARTBEAT_TIMEOUT_SECONDS + GRACE_SECONDS + SLACK_SECONDS)
    with RemoteRank(place.address, layout()) as rank:
        step = rank.open()[-1].step
        assert step in (0, 1)
        rank.assert_at(step)
