"""A daemon that has a codec trains, is killed, resumes and is copied; one without it refuses the job by name."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import DType, Kind
from tests.integration.support.admin import admin
from tests.integration.support.daemon import Daemon
from tests.integration.support.store_client import Clients, Rank, refused
from tests.unit.storage.builders import TILED, Layout
from tests.unit.storage.root_codec import ROOT
from tests.unit.storage.test_codec import RANGES
from trainer_client.client.store_client.connection import Connection
from trainer_client.client.transport.credentials import NO_CREDENTIALS
from trainer_client.copying.put_step import copy_step
from trainer_client.errors import JobConflictError

BUDGETS = {"host_budget": "16MiB", "nvme_budget": "64MiB"}
CODING = "tests.integration.support.coding_daemon"
ENCODED = Layout(numels=TILED, precision=DType.BFLOAT16, codec=ROOT.name)


def copy(origin: Daemon, target: Daemon) -> None:
    """Copy the newest step of the job, which both layouts name alike, from one daemon to another one."""
    source, sink = (
        Connection(daemon.address, "test", NO_CREDENTIALS, prefer_streams=False) for daemon in (origin, target)
    )
    with closing(source), closing(sink):
        copy_step(source, sink, ENCODED.name)


@pytest.mark.parametrize("layout", [ENCODED, RANGES], ids=["encoded", "ranges"])
def test_encoded_states_outlive_a_kill_and_are_copied_as_the_same_bits(tmp_path: Path, layout: Layout) -> None:
    with Daemon(tmp_path / "state", BUDGETS, module=CODING) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(layout).begin()
        rank.train(1, 3)
        rank.assert_at(3)
        # The lease on a state has its elements, four bytes for each, and not its records.
        lease = rank.acquire(layout.groups[0], Kind.EXP_AVG, pb.LEASE_MODE_READ)
        assert lease.size_bytes == 4 * layout.group(layout.groups[0]).numel
        daemon.kill()
    with ExitStack() as running:
        daemon = running.enter_context(Daemon(tmp_path / "state", BUDGETS, module=CODING))
        clients = running.enter_context(Clients(daemon.address))
        rank = clients.rank(layout)
        assert rank.resume() == 3
        rank.train(4, 5)
        rank.assert_at(5)
        rank.close()
        other = running.enter_context(Daemon(tmp_path / "other", BUDGETS, module=CODING))
        copy(daemon, other)
        copied: Rank = running.enter_context(Clients(other.address)).rank(layout)
        assert copied.resume() == 5
        copied.assert_at(5)
        copied.train(6, 6)
        copied.assert_at(6)


def test_a_daemon_without_the_codec_refuses_it_by_name_and_changes_nothing(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state", BUDGETS, module=CODING) as daemon, Clients(daemon.address) as clients:
        clients.rank(ENCODED).begin().train(1, 1)
        with Daemon(tmp_path / "without", BUDGETS) as without, Clients(without.address) as strangers:
            rank = strangers.rank(ENCODED)
            rank.open()
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "newer release", "codec 'test-root8'"):
                rank.register()
            rank.close()
            with pytest.raises(JobConflictError, match="codec 'test-root8'"):
                copy(daemon, without)
            admin(without.address, "health")
        # A daemon that stops in order leaves no log of SQLite, which the next one would write to the catalog.
        assert daemon.stop() == 0
    before = (tmp_path / "state/data.0").read_bytes(), (tmp_path / "state/catalog.sqlite").read_bytes()
    daemon = Daemon(tmp_path / "state", BUDGETS, wait=False)
    assert daemon.wait() != 0
    assert "written by a newer release" in daemon.log and "codec 'test-root8'" in daemon.log
    assert "Traceback" not in daemon.log
    assert ((tmp_path / "state/data.0").read_bytes(), (tmp_path / "state/catalog.sqlite").read_bytes()) == before
