"""Clients that are stopped past their deadline: their leases are void, and their late writes reach no bytes of another
client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind
from storage.tiers.base import PAGE_BYTES
from tests.integration.conftest import HEARTBEAT_TIMEOUT_SECONDS
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Clients
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

WRITE = pb.LEASE_MODE_WRITE


class StoppedClient:
    """A client in a process of its own that the test stops and wakes. stopped_client.py has its program."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.support.stopped_client", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Return the client's next line of output, parsed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client has ended"
        fields: dict[str, Any] = json.loads(line)
        return fields

    def go_on(self) -> None:
        """Have the client go on with its next action."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def stopped_clients(count: int, daemon: Daemon, job: str) -> Iterator[list[StoppedClient]]:
    """Start clients that lease memory, stop them, and wait until the daemon has ended their sessions."""
    clients = [StoppedClient(daemon.address, f"{job}-{i}", f"{job}-{i}-new") for i in range(count)]
    try:
        nbytes = [client.answer()["written_bytes"] for client in clients]
        assert tiers(daemon.address)[0].leased_bytes >= sum(nbytes)
        for client in clients:
            client.signal(signal.SIGSTOP)
        wait_until(lambda: tiers(daemon.address)[0].leased_bytes == 0, seconds=HEARTBEAT_TIMEOUT_SECONDS + 5)
        held = tiers(daemon.address)[0].quarantined_bytes
        assert sum(nbytes) <= held <= sum(nbytes) + 2 * count * PAGE_BYTES, "read leases are not held back"
        yield clients
    finally:
        for client in clients:
            client.process.kill()
            client.process.communicate()


def test_late_writes_of_a_client_that_was_stopped_reach_nobody(clients: Clients, daemon: Daemon, job: str) -> None:
    layouts = [Layout(name=f"{job}-{i}") for i in range(2)]
    for layout in layouts:
        clients.rank(layout, run_id="first").begin().close()
    with stopped_clients(2, daemon, job) as (waking, dying):
        # The kernel tells the daemon that a stopped process has died, and the daemon frees its quarantined memory.
        held = tiers(daemon.address)[0].quarantined_bytes
        dying.signal(signal.SIGKILL)
        wait_until(lambda: tiers(daemon.address)[0].quarantined_bytes == held // 2)

        # Meanwhile the job goes on, in other memory than the stopped client had leased.
        rank = clients.rank(layouts[0], run_id="second")
        assert rank.resume() == 0
        leases = {group: rank.acquire(group, Kind.GRAD, WRITE, step=1) for group in rank.groups}
        for group, lease in leases.items():
            rank._fill(lease, Kind.GRAD, [rank.reference.gradient(1, group, i) for i in range(len(layouts[0].shards))])
        before = {group: rank.tensor(lease, Kind.GRAD).clone() for group, lease in leases.items()}

        waking.signal(signal.SIGCONT)
        waking.go_on()
        found = waking.answer()
        assert found["checks"] == ["SessionEndedError"] * 2
        assert found["publishing"] == found["applying"] == "SessionEndedError"
        for group, lease in leases.items():
            assert torch.equal(rank.tensor(lease, Kind.GRAD), before[group])
            rank.apply(1, lease, group=group)
        rank.commit(1)
        rank.assert_at(1)

        # The memory stays quarantined while the client has views of it, because it could still write.
        assert tiers(daemon.address)[0].quarantined_bytes == held // 2
        waking.go_on()
        waking.answer()
        assert tiers(daemon.address)[0].quarantined_bytes == held // 2
        waking.go_on()
        assert waking.answer()["plane"] == "arena"
        wait_until(lambda: tiers(daemon.address)[0].quarantined_bytes == 0)
        waking.go_on()
        assert waking.process.wait(20) == 0
