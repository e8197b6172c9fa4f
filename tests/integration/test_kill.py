"""kill -9 of the daemon at any instant: the last step that was acknowledged is there, whole, and training goes on."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from storage.shard import DType, Kind, TierName
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.store_client import Clients, Rank
from tests.unit.storage.builders import Layout

LAYOUT = Layout(precision=DType.BFLOAT16, moments=TierName.HOST)


def resumed(clients: Clients, layout: Layout, run_id: str) -> tuple[Rank, int]:
    """A rank of a new run, at the newest committed step."""
    rank = clients.rank(layout, run_id=run_id)
    step = rank.resume()
    rank.call("RollBack", step=step)
    rank.assert_at(step)
    return rank, step


def version_bytes(layout: Layout) -> int:
    """Bytes of one version on NVMe, in whole pages."""
    numel = layout.group(layout.groups[0]).numel
    return sum(-(-numel * layout.dtype(kind).itemsize // 4096) * 4096 for kind in layout.kinds) * len(layout.groups)


def test_between_steps_and_with_gradients_handed_over(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(LAYOUT).begin()
        rank.train(1, 3)
        daemon.kill()
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        rank, step = resumed(clients, LAYOUT, "second")
        assert step == 3
        assert tiers(daemon.address)[1].used_bytes == version_bytes(LAYOUT), "nothing of abandoned steps is kept"
        rank.hand_over(4)
        # The update of the first group is done, and its weights were seen by the next forward.
        rank.release(rank.acquire(rank.groups[0], Kind.PARAM, pb.LEASE_MODE_READ))
        daemon.kill()
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        rank, step = resumed(clients, LAYOUT, "third")
        assert step == 3
        rank.train(4, 6)
        rank.assert_at(6)
        assert daemon.stop() == 0


def test_at_any_instant_while_steps_are_committed(tmp_path: Path) -> None:
    """The daemon is killed at random instants of a client that trains without a pause."""
    rng = random.Random(5)
    reached = 0
    for attempt in range(4):
        with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
            if attempt == 0:
                rank, step = clients.rank(LAYOUT).begin(), 0
            else:
                rank, step = resumed(clients, LAYOUT, str(attempt))
            # An answer may have been lost with the daemon, never a step that was acknowledged.
            assert step in (reached, reached + 1)
            acknowledged = step
            killer = threading.Timer(rng.uniform(0.02, 0.4), daemon.process.kill)
            killer.start()
            with pytest.raises(grpc.RpcError):
                for following in range(step + 1, step + 1000):
                    rank.train(following, following)
                    acknowledged = following
            killer.join()
        reached = acknowledged
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        rank, step = resumed(clients, LAYOUT, "last")
        assert step in (reached, reached + 1) and step > 1
        rank.train(step + 1, step + 1)
        rank.assert_at(step + 1)


def test_a_snapshot_or_nothing_is_there_as_the_durability_says(tmp_path: Path) -> None:
    snapshots = replace(LAYOUT, name="snapshots", every_steps=2)
    volatile = replace(LAYOUT, name="volatile", every_steps=0)
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        for layout in (snapshots, volatile):
            rank = clients.rank(layout).begin()
            rank.train(1, 5)
            rank.assert_at(5)
            assert [v.step for v in rank.call("ListVersions").versions][-1] == 5
            if layout is snapshots:
                # The snapshot of step 4 is written in the background; the next would wait for it.
                rank.train(6, 6)
        daemon.kill()
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        assert clients.rank(volatile, run_id="second").open() == []
        rank, step = resumed(clients, snapshots, "second")
        assert step in (4, 6)
        rank.train(step + 1, step + 2)
        rank.assert_at(step + 2)
