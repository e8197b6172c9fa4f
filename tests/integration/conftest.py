"""The daemon that the tests of one pytest session share, and a check after each test that it left no bytes behind in
it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.store_client import Clients

# A process may get no processor for two seconds on a machine that others share, so this is longer.
HEARTBEAT_TIMEOUT_SECONDS = 4.0
GRACE_SECONDS = 0.5


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {
        "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_SECONDS,
        "session_grace_seconds": GRACE_SECONDS,
        "nvme_budget": "256MiB",
    }
    with Daemon(tmp_path_factory.mktemp("shared") / "state", config) as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture(scope="session")
def model_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a daemon that serves the runs of tests/integration/support/model_runs.py, each as a job.

    A test takes it unless it is about the daemon that a run starts for itself, which takes 4 s to start and to stop.
    """
    config = {"host_budget": "128MiB", "nvme_budget": "4GiB"}
    with Daemon(tmp_path_factory.mktemp("models") / "state", config) as daemon:
        yield daemon.address
        assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The shared daemon, without jobs. After the test the daemon must use as many bytes on each tier as before it."""
    before = _usage(shared_daemon)
    yield shared_daemon
    deadline = time.monotonic() + 10
    while True:
        with admin_of(shared_daemon.address) as admin:
            sessions = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10).sessions
            for job in admin.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs if not sessions else ():
                admin.DeleteJob(admin_pb.DeleteJobRequest(job=job.name), timeout=10)
        after = _usage(shared_daemon)
        if after == before:
            return
        assert time.monotonic() < deadline, f"{sessions} sessions; used before {before}, after {after}"
        time.sleep(0.02)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job name that no other test uses."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def clients(daemon: Daemon) -> Iterator[Clients]:
    """Clients of the shared daemon. They are closed before the fixture `daemon` compares the bytes that are in use."""
    with Clients(daemon.address) as opened:
        yield opened


def _usage(daemon: Daemon) -> list[tuple[int, int, int]]:
    with admin_of(daemon.address) as admin:
        reading = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10).tiers
        # The gpu tier is there only after a session has offered memory of its device.
        return [(tier.tier, tier.used_bytes, tier.leased_bytes) for tier in reading if tier.used_bytes]
