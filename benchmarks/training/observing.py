"""What it costs a run that its daemon is watched: metrics read each second, and the figures of the web page every two.

With `--scrape-seconds 15` the metrics are read as often as the configuration in deploy/prometheus has them read. Then
stretches have to be longer, such as `--steps 30`.

One rank trains two models in turns, stretch by stretch: one at a daemon without an endpoint, one at a daemon whose
endpoint another process reads. Two daemons of the same configuration differ by 1 to 3 %, by the order in which they
were started, so both orders are measured. The result is the mean of the medians of both orders' ratios, and the
processor seconds of each daemon for a second of training. `python -m benchmarks.training.observing` prints it;
OMP_NUM_THREADS=1 leaves the other cores to the daemons and to the reader.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.store_daemon import StoreDaemon, started
from benchmarks.training.stretches import StretchedRun, blocks_of, run_benchmark
from trainer_client.plan.probe import free_port

# Reads the metrics at an interval, which is a whole number of seconds, and the page's figures every other second, until
# its input ends.
READER = """
import select, sys, urllib.request
address, interval, seconds = sys.argv[1], int(sys.argv[2]), 0
while not select.select([sys.stdin], [], [], 1.0)[0]:
    if seconds % interval == 0:
        urllib.request.urlopen(f"http://{address}/metrics").read()
    if seconds % 2 == 0:
        urllib.request.urlopen(f"http://{address}/data.json?since=0").read()
    seconds += 1
"""


class Side(StretchedRun):
    """One model at one daemon, with what its stretches took.

    Attributes:
        seconds: those of each stretch that counts.
        processor_seconds: what the daemon used in all of them.
    """

    def __init__(self, daemon: StoreDaemon, arguments: argparse.Namespace) -> None:
        super().__init__(blocks_of(arguments), {"address": daemon.socket_address}, arguments)
        self.seconds: list[float] = []
        self.processor_seconds = 0.0
        self._daemon = psutil.Process(daemon.pid)

    def train(self, steps: int, *, counts: bool) -> None:
        """Train a stretch of steps, and keep what it took if it counts."""
        self.engine.wait_for_commit()
        used = self._used()
        seconds = self.train_stretch(steps)
        if counts:
            self.seconds.append(seconds)
            self.processor_seconds += self._used() - used

    def _used(self) -> float:
        times = self._daemon.cpu_times()
        return float(times.user + times.system)


@contextmanager
def read_all_the_time(address: str, scrape_seconds: int) -> Iterator[None]:
    """Have another process read the endpoint within the context. Raise CalledProcessError if a read fails."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, address, str(scrape_seconds)], stdin=subprocess.PIPE
    ) as reader:
        yield
        reader.communicate()
        if reader.returncode:
            raise subprocess.CalledProcessError(reader.returncode, "the reader of the endpoint")


def measure(arguments: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    """Return the figures of all pairs of stretches, in both orders of the daemons."""
    sides = [_run(arguments, directory / "silent first", watched_first=False)]
    sides.append(_run(arguments, directory / "watched first", watched_first=True))
    by_order = [[b / a for a, b in zip(one.seconds, other.seconds, strict=True)] for one, other in sides]
    silent, watched = ([pair[index] for pair in sides] for index in (0, 1))
    seconds = [second for side in silent for second in side.seconds]
    return {
        "ratio": round(statistics.geometric_mean(map(statistics.median, by_order)), 4),
        "ratios_silent_first": [round(ratio, 4) for ratio in sorted(by_order[0])],
        "ratios_watched_first": [round(ratio, 4) for ratio in sorted(by_order[1])],
        "seconds_of_a_step": round(statistics.mean(seconds) / arguments.steps, 4),
        "daemon_processor_seconds_a_second": {"silent": _share(silent), "watched": _share(watched)},
    }


def _run(arguments: argparse.Namespace, directory: Path, *, watched_first: bool) -> tuple[Side, Side]:
    """Start both daemons, train with them in turns, and return the silent side and the watched one."""
    budgets = {"host_budget": "256MiB", "nvme_budget": "4GiB"}
    endpoint = f"127.0.0.1:{free_port()}"
    configs = {"silent": budgets, "watched": budgets | {"metrics_listen": endpoint}}
    names = sorted(configs, reverse=watched_first)
    with ExitStack() as running:
        sides: dict[str, Side] = {}
        for name in names:
            (directory / name).mkdir(parents=True)
            sides[name] = Side(running.enter_context(started(directory / name, configs[name])), arguments)
            running.enter_context(sides[name].engine)
        for pair in range(arguments.pairs + 1):
            for name in names:
                with read_all_the_time(endpoint, arguments.scrape_seconds) if name == "watched" else nullcontext():
                    sides[name].train(arguments.steps, counts=pair > 0)
    return sides["silent"], sides["watched"]


def _share(sides: Sequence[Side]) -> float:
    """Return the processor seconds that the daemons of these sides used in a second of training."""
    return round(sum(side.processor_seconds for side in sides) / sum(sum(side.seconds) for side in sides), 4)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scrape-seconds", type=int, default=1, help="whole seconds from one reading to the next")


if __name__ == "__main__":
    run_benchmark(__doc__, measure, pairs=9, add_options=_add_options)
