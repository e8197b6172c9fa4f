"""What replicas cost a run: the time of a step with and without one, and the bytes that a replicated step takes.

One rank trains three models in turns, stretch by stretch, all states on NVMe: without a replica, with one that follows
(durability `step`), and with one that each commit waits for (`replicated`). The holder's daemon and the followers are
on the same machine and the same disk, so a replica costs more here than on another node. A third of the layers is
frozen. Between two stretches the followers catch up, which is not timed. `python -m benchmarks.training.replicating`
prints the medians of the ratios of the pairs, as one line of JSON; OMP_NUM_THREADS=1 leaves the other cores to the
daemons.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.store_daemon import StoreDaemon, started
from benchmarks.training.stretches import StretchedRun, blocks_of, run_benchmark
from paramserver.contract.channel import channel_to
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub

_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """What a daemon says of a job and its replica."""

    committed: int
    held: int
    sent_bytes: int
    copy_seconds: float


class Side(StretchedRun):
    """One model at one daemon, with the settings of its replicas; the first third of its layers is frozen."""

    def __init__(
        self, name: str, daemon: StoreDaemon, section: Mapping[str, Any], arguments: argparse.Namespace
    ) -> None:
        blocks = blocks_of(arguments, frozen=arguments.layers // 3)
        super().__init__(blocks, {"address": daemon.socket_address, "job": name, **section}, arguments)
        self.seconds: list[float] = []
        self.job = name
        self.address = daemon.socket_address
        self.has_replica = bool(section)
        self.sent_bytes = 0
        self.copy_seconds: list[float] = []
        self.steps_behind: list[int] = []

    def train(self, steps: int, *, counts: bool) -> None:
        """Train a stretch of steps, keep what it took if it counts, and let the follower catch up."""
        self.engine.wait_for_commit()
        before = self.replicated()
        seconds = self.train_stretch(steps)
        behind = self.replicated()
        while self.has_replica and (now := self.replicated()).held < now.committed:
            time.sleep(_LOOK_SECONDS)
        if counts:
            self.seconds.append(seconds)
            self.sent_bytes += self.replicated().sent_bytes - before.sent_bytes
            self.copy_seconds.append(behind.copy_seconds)
            self.steps_behind.append(behind.committed - behind.held)

    def replicated(self) -> Replicated:
        """Return what the daemon says now."""
        with channel_to(self.address) as channel:
            listed = StoreAdminStub(channel).ListJobs(admin_pb.ListJobsRequest(), timeout=30).jobs
        job = next(job for job in listed if job.name == self.job)
        replica = job.replicas[0] if job.replicas else admin_pb.JobInfo.Replica()
        return Replicated(
            committed=job.committed_step,
            held=replica.step if replica.HasField("step") else -1,
            sent_bytes=replica.sent_bytes,
            copy_seconds=replica.copy_seconds,
        )

    def figures(self, alone: Sequence[float], steps: int) -> dict[str, Any]:
        """Return the figures of a side with a replica, beside the seconds of the side without one.

        Args:
            alone: the seconds of the other side's stretches.
            steps: the steps of all stretches that count.
        """
        ratios = sorted(mine / other for mine, other in zip(self.seconds, alone, strict=True))
        return {
            "step_time_ratio": round(statistics.median(ratios), 4),
            "step_time_ratios": [round(ratio, 4) for ratio in ratios],
            "sent_bytes_a_step": round(self.sent_bytes / steps),
            "seconds_of_a_copy": round(statistics.median(self.copy_seconds), 4),
            "steps_behind_at_the_end": self.steps_behind,
        }


def measure(arguments: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    """Return the figures of all rounds of stretches."""
    budgets = {"host_budget": "1GiB", "nvme_budget": "8GiB"}
    for name in ("own", "holder"):
        (directory / name).mkdir()
    with ExitStack() as closing:
        own, holder = (closing.enter_context(started(directory / name, budgets)) for name in ("own", "holder"))
        section = {"replicas": 1, "replica": {"addresses": [holder.socket_address]}}
        sides = [
            Side("alone", own, {}, arguments),
            Side("follows", own, section, arguments),
            Side("waits", own, section | {"durability": "replicated"}, arguments),
        ]
        for side in sides:
            closing.enter_context(side.engine)
        for pair in range(arguments.pairs + 1):
            for side in sides:
                side.train(arguments.steps, counts=pair > 0)
        alone, *others = sides
        elements = [sum(p.numel() for p in one.parameters()) for one in blocks_of(arguments)]
        steps = arguments.pairs * arguments.steps
        return {
            "seconds_of_a_step": round(sum(alone.seconds) / steps, 4),
            # In fp32, a parameter has 4 bytes, and so has each of the two moments of a trained one.
            "bytes_of_the_state": 4 * sum(elements) + 8 * sum(elements[arguments.layers // 3 :]),
            "bytes_that_a_step_changes": 12 * sum(elements[arguments.layers // 3 :]),
            **{side.job: side.figures(alone.seconds, steps) for side in others},
        }


if __name__ == "__main__":
    run_benchmark(__doc__, measure, pairs=7)
