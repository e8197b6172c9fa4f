"""What it costs a run that its daemon is watched: metrics read each second, and the figures of the web page every two.

One rank trains two models in turns, stretch by stretch: one at a daemon without an endpoint, one at a daemon whose
endpoint another process reads. The result is the median of the ratios of the pairs, and the processor seconds of each
daemon for a second of training. `python -m benchmarks.training.observing` prints it; OMP_NUM_THREADS=1 leaves the other
cores to the daemons and to the reader.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import trainer_client
from benchmarks.common.machine import describe, provenance
from benchmarks.common.store_daemon import StoreDaemon, started
from trainer_client.plan.probe import free_port

# Reads the metrics each second and the page's figures every other second, until its input ends.
READER = """
import select, sys, urllib.request
address, reads = sys.argv[1], 0
while not select.select([sys.stdin], [], [], 1.0)[0]:
    urllib.request.urlopen(f"http://{address}/metrics").read()
    if reads % 2 == 0:
        urllib.request.urlopen(f"http://{address}/data.json?since=0").read()
    reads += 1
print(reads)
"""


class Side:
    """One model at one daemon."""

    def __init__(self, daemon: StoreDaemon, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width = arguments.width
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(arguments.layers)]
        nvme = {"device": "nvme"}
        config = {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "paramserver": {"address": daemon.socket_address},
        }
        self.engine = trainer_client.initialize(model=nn.Sequential(*blocks), config=config)[0]
        self.seconds: list[float] = []
        self.processor_seconds = 0.0
        self._daemon = psutil.Process(daemon.pid)
        self._inputs = torch.randn(arguments.batch, width)

    def train(self, steps: int, *, counts: bool) -> None:
        """Train a stretch of steps, and keep what it took if it counts."""
        self.engine.wait_for_commit()
        used, began = self._used(), time.perf_counter()
        for _ in range(steps):
            self.engine.backward(self.engine(self._inputs).square().mean())
            self.engine.step()
        self.engine.wait_for_commit()
        if counts:
            self.seconds.append(time.perf_counter() - began)
            self.processor_seconds += self._used() - used

    def _used(self) -> float:
        times = self._daemon.cpu_times()
        return float(times.user + times.system)


@contextmanager
def read_all_the_time(address: str) -> Iterator[None]:
    """Have another process read the endpoint within the context. Raise CalledProcessError if a read fails."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        yield
        reader.communicate()
        if reader.returncode:
            raise subprocess.CalledProcessError(reader.returncode, "the reader of the endpoint")


def measure(arguments: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    """Return the figures of all pairs of stretches."""
    budgets = {"host_budget": "256MiB", "nvme_budget": "4GiB"}
    endpoint = f"127.0.0.1:{free_port()}"
    for name in ("silent", "watched"):
        (directory / name).mkdir()
    with (
        started(directory / "silent", budgets) as one,
        started(directory / "watched", budgets | {"metrics_listen": endpoint}) as other,
    ):
        silent, watched = Side(one, arguments), Side(other, arguments)
        with silent.engine, watched.engine:
            for pair in range(arguments.pairs + 1):
                silent.train(arguments.steps, counts=pair > 0)
                with read_all_the_time(endpoint):
                    watched.train(arguments.steps, counts=pair > 0)
    ratios = [other / one for one, other in zip(silent.seconds, watched.seconds, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
        "seconds_of_a_step": round(sum(silent.seconds) / len(silent.seconds) / arguments.steps, 4),
        "daemon_processor_seconds_a_second": {
            "silent": round(silent.processor_seconds / sum(silent.seconds), 4),
            "watched": round(watched.processor_seconds / sum(watched.seconds), 4),
        },
    }


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="width of the model's layers")
    parser.add_argument("--layers", type=int, default=12, help="their number")
    parser.add_argument("--batch", type=int, default=512, help="samples in a step")
    parser.add_argument("--steps", type=int, default=8, help="steps in a stretch")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of stretches after the one that warms up")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        machine = describe(Path(directory))
        figures = measure(arguments, Path(directory))
    extra = {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "load": os.getloadavg()[0]}
    print(json.dumps({**figures, **extra, "machine": machine, "commit": provenance()}))


if __name__ == "__main__":
    main()
