"""After kill -9 of the daemon at any instant the last acknowledged step is there as a whole, and training goes on."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import DType, Kind, TierName
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.store_client import Clients, Rank
from tests.unit.storage.builders import Layout

LAYOUT = Layout(precision=DType.BFLOAT16, moments=TierName.HOST)


def resumed(clients: Clients, layout: Layout, run_id: str) -> tuple[Rank, int]:
    """Open a new run, roll back to the newest committed step, and return the rank and that step."""
    rank = clients.rank(layout, run_id=run_id)
    step = rank.resume()
    rank.call("RollBack", step=step)
    rank.assert_at(step)
    return rank, step


def version_bytes(layout: Layout) -> int:
    """Return the number of bytes that one version has on NVMe, in whole pages."""
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
        # This read waits until the first group's update is done, and reads its new weights as the next forward does.
        rank.release(rank.acquire(rank.groups[0], Kind.PARAM, pb.LEASE_MODE_READ))
        daemon.kill()
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        rank, step = resumed(clients, LAYOUT, "third")
        assert step == 3
        rank.train(4, 6)
        rank.assert_at(6)
        assert daemon.stop() == 0


def test_at_any_instant_while_steps_are_committed(tmp_path: Path) -> None:
    """A timer kills the daemon at a random instant while a client trains without a pause."""
    rng = random.Random(5)
    reached = 0
    for attempt in range(4):
        with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
            if attempt == 0:
                rank, step = clients.rank(LAYOUT).begin(), 0
            else:
                rank, step = resumed(clients, LAYOUT, str(attempt))
            # The daemon may die before it answers, so the step may be one later than the last acknowledged one, but
            # never earlier.
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
                # The snapshot of step 4 is written in the background. Step 6 is a snapshot too, and waits for it.
                rank.train(6, 6)
        daemon.kill()
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        assert clients.rank(volatile, run_id="second").open() == []
        rank, step = resumed(clients, snapshots, "second")
        assert step in (4, 6)
        rank.train(step + 1, step + 2)
        rank.assert_at(step + 2)
