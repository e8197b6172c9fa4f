"""Clients whose device copies from and to the arena on its own: what it may still write to after the client's end is
granted to no other client, and a rank votes only behind the last copy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind
from storage.tiers.base import PAGE_BYTES
from tests.integration.support.cutter import Cutter
from tests.integration.support.daemon import Daemon, admin_of, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Clients
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import SessionEndedError

# The quarantine looks more often than this.
A_WHILE_SECONDS = 0.5


class RegisteringClient:
    """A client in a process of its own, which registering_client.py has."""

    def __init__(self, daemon: Daemon, job: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.support.registering_client", daemon.address, job],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.begun = self._answer()
        assert self.begun["are_pinned"] and self.begun["calls"] == ["register"]

    def do(self, what: str) -> dict[str, Any]:
        """Have the client do what registering_client.py knows by this name, and return its answer."""
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client has ended"
        fields: dict[str, Any] = json.loads(line)
        return fields


@contextmanager
def registering(daemon: Daemon, job: str) -> Iterator[RegisteringClient]:
    client = RegisteringClient(daemon, job)
    try:
        yield client
    finally:
        client.process.kill()
        client.process.communicate()


def daemon_with(directory: Path, late_copy_seconds: float) -> Daemon:
    """Start a daemon that notices quickly that a client has gone."""
    config = {
        "late_copy_seconds": late_copy_seconds,
        "heartbeat_timeout_seconds": 2.0,
        "session_grace_seconds": 0.2,
    }
    return Daemon(directory / "state", config)


def quarantined(daemon: Daemon) -> int:
    return tiers(daemon.address)[0].quarantined_bytes


def wait_until_held(daemon: Daemon, client: RegisteringClient) -> None:
    """Wait until the session has ended, and check that what it was writing to is held back, and explained."""
    wait_until(lambda: tiers(daemon.address)[0].leased_bytes == 0 and quarantined(daemon))
    held, written = quarantined(daemon), client.begun["written_bytes"]
    assert written <= held < written + 4 * PAGE_BYTES
    with admin_of(daemon.address) as admin:
        accounts = admin.GetAccounts(admin_pb.GetAccountsRequest(), timeout=10).accounts
    assert all(account.settled for account in accounts), accounts


def stays_held(daemon: Daemon) -> bool:
    before = quarantined(daemon)
    time.sleep(A_WHILE_SECONDS)
    return before == quarantined(daemon) > 0


def test_ranges_of_a_killed_client_wait_for_its_process_and_then_for_the_time(tmp_path: Path) -> None:
    layout = Layout(name="job")
    with daemon_with(tmp_path, late_copy_seconds=0.0) as daemon, Clients(daemon.address) as clients:
        clients.rank(layout, run_id="first").begin().close()
        with registering(daemon, "job") as client:
            client.do("lose the lock")
            wait_until_held(daemon, client)
            assert stays_held(daemon), "the lock is gone, but the process has not ended"
            client.kill()
            wait_until(lambda: quarantined(daemon) == 0)


def test_what_a_device_may_write_to_is_granted_to_nobody_before_the_time(tmp_path: Path) -> None:
    layout = Layout(name="job")
    with daemon_with(tmp_path, late_copy_seconds=600.0) as daemon, Clients(daemon.address) as clients:
        clients.rank(layout, run_id="first").begin().close()

        # A client that is stopped holds its lock. When it leaves in order, the time does not count.
        with registering(daemon, "job") as client:
            client.process.send_signal(signal.SIGSTOP)
            wait_until_held(daemon, client)
            assert stays_held(daemon)
            client.process.send_signal(signal.SIGCONT)
            assert client.do("leave")["calls"] == ["register", "synchronize", "unregister"]
            wait_until(lambda: quarantined(daemon) == 0)

        with registering(daemon, "job") as client:
            client.kill()
            wait_until_held(daemon, client)
            assert stays_held(daemon), "the process has ended, but the time is not over"
            rank = clients.rank(layout, run_id="second")
            assert rank.resume() == 0
            granted = [rank.acquire(group, Kind.GRAD, pb.LEASE_MODE_WRITE, step=1) for group in rank.groups]
            first, end = client.begun["offset"], client.begun["offset"] + PAGE_BYTES
            assert all(lease.arena_offset >= end or lease.arena_offset + lease.size_bytes <= first for lease in granted)


def test_a_rank_votes_after_its_last_copy_and_a_look_at_the_word(
    clients: Clients, daemon: Daemon, job: str, tmp_path: Path
) -> None:
    layout = Layout(name=job)
    clients.rank(layout, run_id="first").begin().close()
    with Cutter(tmp_path / "cutter", daemon.socket) as cutter, closing(RankStore(cutter.address, "late")) as store:
        rank = clients.rank(layout, run_id="second")
        rank.session_id = store.session_id
        rank.resume()

        def wait_for_copies() -> None:
            """Lose the session while the last copy is under way, as if this process had been stopped."""
            cutter.refusing = True
            cutter.cut()
            wait_until(lambda: "session of late ended" in daemon.log)

        # The connection is still refused, so only the word says that the session has ended.
        with pytest.raises(SessionEndedError, match="leases are void"):
            store.steps.commit(1, b"", 0, wait_for_copies=wait_for_copies)
        again = clients.rank(layout, run_id="third")
        assert again.resume() == 0, "there was no vote"
