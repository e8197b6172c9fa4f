"""Makes the pictures of docs/page.md: `python -m tests.integration.support.page_pictures docs/images`.

A daemon is watched while two jobs train through it for some minutes, and Chromium takes pictures of its page. The first
picture is the whole page in light, the second its upper part in dark, the third its upper part as wide as a phone.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import DType, Kind, TierName
from tests.integration.support.browser import Browser, what_is_missing
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import free_port
from tests.integration.support.store_client import Clients, Rank
from tests.unit.storage.builders import Layout

# The pictures name a node and a directory of their own, and not the machine and the temporary directory on which they
# are made: in the daemon's view of the file systems, the directory $0 is at SHOWN_AT.
SHOWN_AT = "/mnt"
ON_A_NODE = (
    *("unshare", "--map-root-user", "--uts", "--mount"),
    *("sh", "-c", f'hostname node7 && mount --bind "$0" {SHOWN_AT} && exec "$@"'),
)
CONFIG = {"host_budget": "96MiB", "nvme_budget": "2GiB"}
LARGE = Layout(
    name="gpt2-medium/seed-17",
    numels=(1_500_000, 1_000, 500_000),
    groups=tuple(f"block.{index}" for index in range(4)),
    precision=DType.BFLOAT16,
)
SMALL = Layout(
    name="probe/linear", numels=(200_000, 16), groups=("head",), weights=TierName.HOST, moments=TierName.HOST
)


class Training:
    """A rank that trains on a thread of its own until it is stopped."""

    def __init__(self, rank: Rank, pause_seconds: float) -> None:
        self._rank = rank
        self._pause_seconds = pause_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step under way."""
        self._stopped.set()
        self._thread.join()

    def _train(self) -> None:
        step = 0
        while not self._stopped.wait(self._pause_seconds):
            step += 1
            for group in self._rank.groups:
                self._rank.release(self._rank.acquire(group, Kind.PARAM, pb.LEASE_MODE_READ))
            # The gradients of one step are as good as those of any other here, and need no reference that is computed.
            self._rank.hand_over(step)
            self._rank.commit(step)


def daemon_on_a_node(directory: Path, metrics: str) -> Daemon:
    """Start a daemon whose page is at `metrics`. Its state directory is `directory`/paramserver, under another name."""
    state_dir = directory / "paramserver"
    state_dir.mkdir()
    # Clients find the socket under the name that it has for them.
    config = CONFIG | {
        "metrics_listen": metrics,
        "state_dir": f"{SHOWN_AT}/{state_dir.name}",
        "socket": str(state_dir / "paramserver.sock"),
    }
    return Daemon(state_dir, config, prefix=(*ON_A_NODE, str(directory)))


def main() -> None:
    """Train, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long the jobs train before the pictures")
    options = parser.parse_args()
    if missing := what_is_missing():
        parser.error(missing)
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="paramserver-") as name:
        directory = Path(name)
        with (
            daemon_on_a_node(directory, address) as daemon,
            Clients(daemon.address) as clients,
            Browser(directory) as browser,
        ):
            trainings = [
                Training(clients.rank(LARGE, name="rank 0 of gpt2-medium").begin(), 0.3),
                Training(clients.rank(SMALL, name="rank 0 of probe").begin(), 1.5),
            ]
            try:
                time.sleep(options.seconds)
                browser.open(f"http://{address}/")
                browser.wait_for("return document.querySelectorAll('#steps article').length === 2")
                for picture, width, scheme, height in (
                    ("page-light", 1180, "light", None),
                    ("page-dark", 1180, "dark", 900),
                    ("page-phone", 360, "light", 1300),
                ):
                    browser.look(width=width, scheme=scheme)
                    time.sleep(3.0)
                    browser.picture(options.directory / f"{picture}.png", height=height)
            finally:
                for training in trainings:
                    training.stop()


if __name__ == "__main__":
    main()
