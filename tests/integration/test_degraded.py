"""Damage on the disk under a running daemon: the scrubber finds it in the background, operators see it, and no client
ever receives the damaged bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import DType, Kind
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.store_client import Clients, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

# This job has more bytes than the host tier has room for.
LAYOUT = Layout(precision=DType.BFLOAT16, groups=tuple(f"block.{number}" for number in range(12)))
SECONDS = 20.0


def nvme_when(daemon: Daemon, holds: Callable[[admin_pb.TierInfo], bool]) -> admin_pb.TierInfo:
    """Read the nvme tier's state until `holds` accepts it, and return that state."""
    deadline = time.monotonic() + SECONDS
    while not holds(nvme := tiers(daemon.address)[1]):
        assert time.monotonic() < deadline, f"it never was so: {nvme}\n{daemon.log}"
        time.sleep(0.05)
    return nvme


def test_damage_is_found_by_the_scrubber_shown_and_refused_by_name(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    config = {
        "host_budget": 4992 << 10,
        "nvme_budget": "256MiB",
        "scrub_bandwidth": "1GiB",
        "nvme_dirs": [str(directory) for directory in directories],
    }
    with Daemon(tmp_path / "state", config) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(LAYOUT).begin()
        rank.train(1, 2)
        healthy = nvme_when(daemon, lambda nvme: nvme.scrub_passes >= 1)
        assert list(healthy.problems) == [] and healthy.damaged_blocks == healthy.bad_bytes == 0
        assert [device.path for device in healthy.devices] == [f"{d}/data.{n}" for n, d in enumerate(directories, 1)]
        assert sum(device.used_bytes for device in healthy.devices) == healthy.used_bytes
        assert all(device.bytes_per_second > 0 for device in healthy.devices)

        for device in healthy.devices:
            with Path(device.path).open("r+b") as file:
                file.write(bytes(Path(device.path).stat().st_size))
        damaged = nvme_when(daemon, lambda nvme: len(nvme.problems) > 0)
        assert damaged.problems[0].startswith("job/block.") and "at step 2 is damaged" in damaged.problems[0]
        assert damaged.bad_bytes > 0 and damaged.damaged_blocks > 0
        # Each session gets the notice once, also a session that opens later. The notice does not name the damaged job.
        told = [rank, clients.client()]
        wait_until(lambda: all(client.notices for client in told))
        for client in told:
            (notice,) = client.notices
            assert notice.startswith("the nvme tier is degraded: some of what it stores is damaged")
        shown = CliRunner().invoke(app, ["tiers", "--address", daemon.address])
        assert "degraded" in shown.output and damaged.problems[0] in shown.output
        with refused(
            grpc.StatusCode.DATA_LOSS, f"at step 2: bytes 0 to {BLOCK_BYTES} (block.", "damaged, stale or of another"
        ):
            for group in rank.groups:
                for kind in (Kind.EXP_AVG, Kind.MASTER):
                    rank.acquire(group, kind, pb.LEASE_MODE_READ)
        assert daemon.stop() == 0
    with Daemon(tmp_path / "state", config) as daemon:
        assert tiers(daemon.address)[1].bad_bytes >= damaged.bad_bytes, "never used again"
