"""A client that waits learns the reason: the daemon answers before the client's deadline, and no client gives up on a
request that the daemon may still grant."""

from __future__ import annotations

import queue
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.config import DaemonConfig
from paramserver.contract.channel import channel_to
from paramserver.server import longest_wait_seconds
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from storage.base.shard import Kind, TierName
from tests.integration.support.daemon import CHANNEL_OPTIONS, MIB, Daemon, tiers
from tests.integration.support.store_client import Clients, Rank, group_to_wire, job_fields, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.client.store_client.connection import Call
from trainer_client.client.transport import deadlines
from trainer_client.client.transport.channel import translate
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import StoreBudgetError, StoreUnavailableError

CODE = grpc.StatusCode
ADMISSION_SECONDS = 6.0
# The holder keeps the memory for longer than the client's own part of a deadline, but not as long as the daemon waits.
BUSY_SECONDS = 1.5
# These elements are fp32, so a slab has 1 MiB.
NUMEL = 256 << 10
WAITING = Layout(name="waiting", numels=(NUMEL,), groups=("a",), weights=TierName.HOST, moments=TierName.HOST)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {"admission_timeout_seconds": ADMISSION_SECONDS, "device_timeout_seconds": 1.0}
    with Daemon(tmp_path_factory.mktemp("deadlines") / "state", config) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@pytest.fixture
def holder(clients: Clients, daemon: Daemon, job: str) -> Rank:
    """A rank that holds nearly all of the host memory by leases on ranges of a parameter."""
    rank = clients.rank(Layout(name=job, numels=(NUMEL,), groups=("a",))).begin()
    reader = rank.call("OpenReader", job=job).reader_id
    held = tiers(daemon.address)[0]
    free = (held.budget_bytes - held.used_bytes + held.evictable_bytes) // MIB
    # The ranges differ, because leases on the same range would share its memory. Each takes 1 MiB.
    ranges = [
        pb.TensorRange(fqn="a.weight.0", kind=pb.KIND_PARAM, numel=NUMEL - index, reader_id=reader)
        for index in range(free - 1)
    ]
    rank.call(
        "AcquireLeases",
        wants=[pb.AcquireLeasesRequest.Want(mode=pb.LEASE_MODE_READ, range=wanted) for wanted in ranges],
    )
    return rank


def register(store: RankStore) -> None:
    store.job.open(pb.OpenJobRequest(**job_fields(WAITING), run_id=secrets.token_hex(8), resume=pb.RESUME_POLICY_AUTO))
    store.job.register_shards([group_to_wire(WAITING.group("a"))])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose own part of a deadline is shorter than the time that the daemon waits."""
    monkeypatch.setattr(deadlines, "CONTROL_DEADLINE_SECONDS", 0.5)


@pytest.mark.usefixtures("hasty")
def test_a_client_waits_for_what_the_daemon_grants_in_the_end(daemon: Daemon, holder: Rank) -> None:
    with closing(RankStore(daemon.address, "hasty")) as store:
        freeing = threading.Timer(BUSY_SECONDS, holder.close)
        freeing.start()
        register(store)
        freeing.join()


@pytest.mark.usefixtures("hasty")
def test_a_client_is_told_why_the_daemon_refuses_in_the_end(daemon: Daemon, holder: Rank) -> None:
    with (
        closing(RankStore(daemon.address, "hasty")) as store,
        pytest.raises(StoreBudgetError, match=r"host_budget 16.0 MiB had no room for .*admission_timeout_seconds"),
    ):
        register(store)
    with closing(RankStore(daemon.address, "hasty")) as store:
        holder.close()
        register(store)


def test_a_deadline_shorter_than_the_daemons_patience_is_answered_shortly_before(
    clients: Clients, daemon: Daemon, holder: Rank
) -> None:
    rank = clients.rank(WAITING, run_id=secrets.token_hex(8))
    rank.open()
    with refused(
        *(CODE.DEADLINE_EXCEEDED, "s that the client allows: 1 requests wait for room in host memory, the first for"),
        "(host_budget is 16.0 MiB",
    ):
        rank.call("RegisterShards", groups=[group_to_wire(WAITING.group("a"))], seconds=4.0)
    other = clients.client()
    leases = [holder.acquire("a", Kind.GRAD, pb.LEASE_MODE_WRITE, step=1)]
    with refused(CODE.DEADLINE_EXCEEDED, "requests wait for room in host memory"):
        leases += [holder.acquire("a", kind, pb.LEASE_MODE_READ, seconds=2.0) for kind in holder.layout.kinds]
    # The daemon removes requests from its queue when their clients' deadlines have passed.
    wait_until(lambda: tiers(daemon.address)[0].queue_depth == 0)
    other.call("ListStoredJobs")
    holder.close()
    rank.register()
    rank.stage_all()
    rank.commit(0)
    rank.assert_at(0)


@pytest.mark.parametrize("config", [{}, {"admission_timeout_seconds": 600.0, "device_timeout_seconds": 120.0}])
def test_no_deadline_of_a_client_is_shorter_than_what_the_daemon_may_wait(config: dict[str, Any]) -> None:
    longest = longest_wait_seconds(DaemonConfig(state_dir=Path("state"), **config))
    welcome = pb.SessionResponse.Welcome(patience_millis=int(longest * 1000))
    given = deadlines.Deadlines.of(welcome)
    assert min(given.control, given.lease, given.commit) > longest
    # A timeout that the user set stays as it is. The default timeout is lengthened by the daemon's patience, once.
    own, default = Call(1.0, 30.0), Call(None, 30.0)
    for call in (own, default, default):
        call.allow(deadlines.patience_seconds(welcome))
    assert own.seconds == 1.0 and longest < default.seconds == 30.0 + longest


def test_a_daemon_that_stops_says_so_and_not_that_something_is_broken(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "state") as daemon,
        channel_to(daemon.address, options=CHANNEL_OPTIONS) as channel,
    ):
        hello: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        # This stream is open, but has not sent its hello yet when the daemon receives SIGTERM.
        stream = pb_grpc.ParameterStoreStub(channel).Session(iter(hello.get, None), timeout=20)
        time.sleep(0.5)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in daemon.log)
        hello.put(pb.SessionRequest(hello=pb.SessionRequest.Hello(client="late")))
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        hello.put(None)
        error = translate(caught.value)
        assert isinstance(error, StoreUnavailableError) and error.code is CODE.UNAVAILABLE
        assert error.message == "the store daemon is shutting down; connect again when it has been started anew"
        assert daemon.wait() == 0
        # The daemon has ended here, so gRPC itself reports that the address does not answer.
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.ParameterStoreStub(channel).ListStoredJobs(pb.ListStoredJobsRequest(), timeout=5)
        assert "cannot be reached" in translate(caught.value).message
