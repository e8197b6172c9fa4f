"""Opens thousands of readers of a daemon's jobs while these commit steps, and checks that no resource is leaked.

`python -m tests.faults.readers --readers N --commits N --seed S [--json]`. Three jobs with different placements and
durabilities commit. Clients open readers of the newest steps, compare some bytes with torch's, and close the reader,
leave it open until their session ends, or cancel its opening. Prints a report in JSON at the end; the exit status is 1
if anything failed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch

from paramserver import vocabulary
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind, TierName
from tests.faults.fuzz import QUIET_SECONDS, leaks
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.store_client import Client, Rank
from tests.unit.storage.builders import Layout, reference_of

CLIENTS = 4
READERS_PER_SESSION = 50
SHAPE: dict[str, Any] = {"numels": (700, 17), "groups": ("a", "b"), "with_skips": False}
LAYOUTS = (
    Layout(name="on nvme", **SHAPE),
    Layout(name="in memory", weights=TierName.HOST, moments=TierName.HOST, every_steps=0, **SHAPE),
    Layout(name="snapshots", weights=TierName.HOST, moments=TierName.HOST, every_steps=3, **SHAPE),
)
DAEMON_CONFIG = {"host_budget": "16MiB", "nvme_budget": "64MiB", "heartbeat_timeout_seconds": 5.0}


@dataclass(slots=True, kw_only=True)
class ReadersReport:
    """The results of a campaign. `endings` has the number of OpenReader calls by status."""

    seed: int
    readers: int = 0
    commits: int = 0
    sessions: int = 0
    compared: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    nvme_used_bytes: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def dump(self, indent: int | None) -> str:
        """Return the report as JSON."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, indent=indent)


class Storm:
    """The readers and trainers of one campaign."""

    def __init__(self, daemon: Daemon, report: ReadersReport, readers: int, commits: int) -> None:
        self._daemon = daemon
        self._report = report
        self._left = readers
        self._commits = commits
        self._lock = threading.Lock()
        self._reading = True

    def run(self) -> None:
        """Commit and read, until the wanted numbers of readers and commits are reached."""
        ranks = [Rank(self._daemon.address, layout).begin() for layout in LAYOUTS]
        trainers = [threading.Thread(target=self._guarded, args=(partial(self._train, rank),)) for rank in ranks]
        readers = [threading.Thread(target=self._guarded, args=(partial(self._read, n),)) for n in range(CLIENTS)]
        for thread in [*trainers, *readers]:
            thread.start()
        for thread in readers:
            thread.join()
        self._reading = False
        for thread in trainers:
            thread.join()
        for rank in ranks:
            rank.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        # Any exception is a finding, which the report names.
        except BaseException as error:
            self._report.failures.append(f"{type(error).__name__}: {error}")

    def _train(self, rank: Rank) -> None:
        step = 0
        while (self._reading or step < self._commits / len(LAYOUTS)) and not self._report.failures:
            step += 1
            rank.hand_over(step)
            rank.commit(step)
            with self._lock:
                self._report.commits += 1

    def _read(self, number: int) -> None:
        rng = random.Random(f"{self._report.seed} {number}")
        while self._take(0) and not self._report.failures:
            client = Client(self._daemon.address, f"reader {number}")
            with self._lock:
                self._report.sessions += 1
            try:
                for _ in range(READERS_PER_SESSION):
                    if not self._take(1):
                        break
                    self._open(client, rng)
            finally:
                client.close()

    def _take(self, count: int) -> bool:
        with self._lock:
            self._left -= count
            return self._left >= 0

    def _open(self, client: Client, rng: random.Random) -> None:
        layout = rng.choice(LAYOUTS)
        seconds = rng.choice([0.0005, 0.001, 0.002]) if rng.random() < 0.2 else 20.0
        try:
            opened = client.call("OpenReader", job=layout.name, seconds=seconds)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            code = error.code()
            with self._lock:
                self._report.endings[code.name] += 1
            if code is not grpc.StatusCode.DEADLINE_EXCEEDED or seconds == 20.0:
                self._report.failures.append(f"OpenReader of {layout.name}: {code.name}: {error.details()}")
            return
        with self._lock:
            self._report.readers += 1
            self._report.endings["OK"] += 1
        if rng.random() < 0.2:
            self._compare(client, layout, opened, rng)
        if rng.random() < 0.9:
            client.call("CloseReader", reader_id=opened.reader_id)

    def _compare(self, client: Client, layout: Layout, opened: pb.OpenReaderResponse, rng: random.Random) -> None:
        group, index = rng.choice(layout.groups), rng.randrange(len(layout.numels))
        kind, fqn = Kind.PARAM, f"{group}.weight.{index}"
        source = pb.TensorRange(
            fqn=fqn, kind=vocabulary.KIND_TO_WIRE[kind], numel=layout.numels[index], reader_id=opened.reader_id
        )
        want = pb.AcquireLeasesRequest.Want(range=source, mode=pb.LEASE_MODE_READ)
        (lease,) = client.call("AcquireLeases", wants=[want]).leases
        leased = memoryview(client.map_arena())[lease.arena_offset :][: lease.size_bytes]
        found = torch.frombuffer(leased, dtype=torch.float32).clone()
        client.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id)])
        with self._lock:
            # The reference computes the states of a step on first use, so its threads must take turns.
            expected = reference_of(layout).states(opened.step)[group, fqn, kind]
            self._report.compared += 1
        if not torch.equal(found, expected):
            self._report.failures.append(f"step {opened.step} of {layout.name}: {fqn} has other bits than torch's")


def run(readers: int, commits: int, seed: int) -> ReadersReport:
    """Run a campaign with a daemon of its own, and return its report."""
    report = ReadersReport(seed=seed)
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="paramserver-readers-") as directory,
        Daemon(Path(directory) / "state", DAEMON_CONFIG, fresh=True) as daemon,
    ):
        Storm(daemon, report, readers, commits).run()
        report.failures += leaks(daemon, QUIET_SECONDS)
        report.nvme_used_bytes = tiers(daemon.address)[1].used_bytes
        if "Traceback" in daemon.log:
            report.failures.append(f"in the daemon's log: {daemon.log[-4000:]}")
    report.seconds = round(time.monotonic() - started, 1)
    return report


def main() -> None:
    """Run a campaign and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.readers", description=__doc__)
    parser.add_argument("--readers", type=int, default=10_000)
    parser.add_argument("--commits", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    parser.add_argument("--json", action="store_true", help="print the report in one line")
    args = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    report = run(args.readers, args.commits, seed)
    print(report.dump(None if args.json else 2))
    raise SystemExit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
