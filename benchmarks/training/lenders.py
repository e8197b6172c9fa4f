"""Compares the steps of a job whose states are in neighbours' memory with the same steps from NVMe.

The link has several speeds in turn. Three daemons run in network namespaces of their own: the job's, and two that lend
it host memory and run no trainer. A fourth daemon without lenders has the same model, and both train in turns, stretch
by stretch. The daemons share this machine's processors with the ranks, so what the network costs in processor time is a
part of what is compared. The links are limited by `tc`. The result is one JSON object:

- `machine`, `provenance`, `state_bytes`
- `codes`: how many GB/s one thread authenticates: `sealed` before blocks are sent, `checked` after they were read, and
  `checksums` of the same blocks, for comparison (medians)
- `links`: for each speed of the link and each value of `remote.use`: `ratio` (the time of a step by that of the daemon
  without lenders: median, least and most of the pairs), `step_seconds` of both, `lent_bytes`, `hits`, `misses`,
  the speeds of lender and NVMe as the daemon measured them, the states of the lenders, and why the link is not limited,
  if it is not

Run as a module from the root of the repository, as root: `python -m benchmarks.training.lenders`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn

import trainer_client
from benchmarks.common import report
from benchmarks.common.machine import ROOT
from benchmarks.common.measure import CpuStopwatch
from benchmarks.common.namespaces import NamespaceError, shape, switched
from benchmarks.common.store_daemon import StoreDaemon, started
from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub
from storage.base.integrity import Checksums
from storage.tiers.block_macs import BlockMacs

LINKS = (1.0, 3.0, 10.0)
HOSTS = ("10.94.7.1", "10.94.7.2", "10.94.7.3")
PORT = 7070
USES = ("faster", "always")
# Enough for the units, gradients and tiles of the model, and too little for its states.
HOST_BUDGET = "64MiB"
# The bytes of one measured run of authentication, and the number of runs.
CODED_BYTES = 64 << 20
CODE_ROUNDS = 9

# Each layer is a unit, so that a rank holds few of them at once.
_SECTION = {"job": "job", "units": {"classes": ["Linear"]}}

app = typer.Typer(add_completion=False)


def blocks_of(arguments: argparse.Namespace) -> list[nn.Module]:
    """Return the layers of the model, the same values each time."""
    torch.manual_seed(0)
    width = arguments.width
    return [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(arguments.layers)]


class StretchedRun:
    """One model at one daemon, with all states on NVMe, trained by one rank."""

    def __init__(self, daemon: StoreDaemon, arguments: argparse.Namespace) -> None:
        """Start the engine at the daemon."""
        nvme = {"device": "nvme"}
        config = {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "paramserver": _SECTION | {"address": daemon.socket_address},
        }
        self.engine = trainer_client.initialize(model=nn.Sequential(*blocks_of(arguments)), config=config)[0]
        self._inputs = torch.randn(arguments.batch, arguments.width)

    def train_stretch(self, steps: int) -> float:
        """Train a stretch of steps, and return its seconds until the last commit; earlier commits do not count."""
        self.engine.wait_for_commit()
        began = time.perf_counter()
        for _ in range(steps):
            self.engine.backward(self.engine(self._inputs).square().mean())
            self.engine.step()
        self.engine.wait_for_commit()
        return time.perf_counter() - began


def measure(links: Sequence[float], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result. It can raise NamespaceError."""
    found = {}
    with switched(HOSTS) as namespaces:
        for link in links:
            problem = shape(namespaces, link)
            for use in USES:
                typer.echo(f"{link:g} GB/s, use = {use}", err=True)
                with tempfile.TemporaryDirectory(dir=ROOT) as directory:
                    figures = _compare(Path(directory), namespaces, use, arguments)
                found[f"{link:g} GB/s, {use}"] = {"link": link, "use": use, "unshaped": problem, **figures}
    parameters = sum(p.numel() for block in blocks_of(arguments) for p in block.parameters())
    return {
        "state_bytes": 12 * parameters,
        "pairs": arguments.pairs,
        "steps": arguments.steps,
        "codes": _measure_codes(),
        "links": found,
    }


def _measure_codes() -> dict[str, float]:
    """Return how many GB/s one thread authenticates, and how many it verifies by checksums."""
    macs, label = BlockMacs(), "job/block.0/exp_avg at step 1"
    buffer = memoryview(np.random.default_rng(1).bytes(CODED_BYTES))
    checksums = Checksums(label, CODED_BYTES)
    checksums.record(0, buffer)
    seals = memoryview(macs.seal(label, 0, buffer))
    works: dict[str, Callable[[], object]] = {
        "sealed": lambda: macs.seal(label, 0, buffer),
        "checked": lambda: macs.is_right(seals, label, 0, buffer),
        "checksums": lambda: checksums.verify(0, buffer),
    }
    rates: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(CODE_ROUNDS):
        for name, work in works.items():
            with CpuStopwatch() as watch:
                work()
            rates[name].append(watch.sample(CODED_BYTES).rate)
    return {name: round(statistics.median(rate), 2) for name, rate in rates.items()}


def _compare(directory: Path, namespaces: Sequence[str], use: str, arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Train both sides in turns, and return the figures of one link and one value of `remote.use`."""
    budgets = {"host_budget": HOST_BUDGET, "nvme_budget": "4GiB"}
    with ExitStack() as closing:
        for name in ("plain", "own", "lender-1", "lender-2"):
            (directory / name).mkdir()
        for number in (1, 2):
            lends = {
                "listen": f"{HOSTS[number]}:{PORT}",
                "insecure": True,
                "host_budget": "512MiB",
                "lend_budget": "480MiB",
            }
            closing.enter_context(started(directory / f"lender-{number}", lends, namespace=namespaces[number]))
        remote = {
            "lenders": [f"{host}:{PORT}" for host in HOSTS[1:]],
            "budget": "960MiB",
            "use": use,
            "insecure": True,
            "retry_seconds": 5.0,
        }
        borrows = budgets | {"remote": remote, "listen": f"{HOSTS[0]}:{PORT}", "insecure": True}
        plain = closing.enter_context(started(directory / "plain", budgets))
        own = closing.enter_context(started(directory / "own", borrows, namespace=namespaces[0]))
        sides = [StretchedRun(daemon, arguments) for daemon in (plain, own)]
        for side in sides:
            closing.enter_context(side.engine)
        # The first round writes the copies, and finds the speeds.
        pairs = [[side.train_stretch(arguments.steps) for side in sides] for _ in range(arguments.pairs + 1)][1:]
        return _figures(pairs, arguments.steps, own)


def _figures(pairs: Sequence[Sequence[float]], steps: int, own: StoreDaemon) -> Mapping[str, Any]:
    with channel_to(own.socket_address) as channel:
        tiers = StoreAdminStub(channel).GetTiers(admin_pb.GetTiersRequest(), timeout=30).tiers
    remote = next(tier for tier in tiers if tier.tier == pb.TIER_REMOTE)
    ratios = sorted(with_lenders / plain for plain, with_lenders in pairs)
    speeds = [lender.bytes_per_second for lender in remote.lenders if lender.bytes_per_second]
    return {
        "ratio": [round(value, 3) for value in (statistics.median(ratios), ratios[0], ratios[-1])],
        "step_seconds": {
            "nvme": round(statistics.median(plain for plain, _ in pairs) / steps, 4),
            "lenders": round(statistics.median(lent for _, lent in pairs) / steps, 4),
        },
        "lent_bytes": remote.used_bytes,
        "hits": remote.hits,
        "misses": remote.misses,
        "lender_bytes_per_second": round(statistics.mean(speeds)) if speeds else None,
        "nvme_bytes_per_second": round(max(lender.nvme_bytes_per_second for lender in remote.lenders)) or None,
        "states": [lender.state for lender in remote.lenders],
    }


def _gigabytes(value: float | None) -> str | None:
    return None if value is None else f"{value / 1e9:.2f}"


def markdown(result: dict[str, Any]) -> str:
    """Return the section of RESULTS.md."""
    rows = [
        [
            name,
            "{:.2f} ({:.2f} to {:.2f})".format(*run["ratio"]),
            f"{run['step_seconds']['nvme']:.3f}",
            f"{run['step_seconds']['lenders']:.3f}",
            f"{run['lent_bytes'] / 2**20:.0f}",
            f"{run['hits']} of {run['hits'] + run['misses']}",
            _gigabytes(run["lender_bytes_per_second"]),
            _gigabytes(run["nvme_bytes_per_second"]),
            ", ".join(run["states"]),
        ]
        for name, run in result["links"].items()
    ]
    unshaped = {run["unshaped"] for run in result["links"].values()} - {None}
    limit = f"The links are not limited: {', '.join(unshaped)}." if unshaped else "`tc` limits what each node sends."
    header = (
        "link, use",
        "ratio",
        "s, nvme",
        "s, lenders",
        "MiB lent",
        "hits",
        "GB/s, lender",
        "GB/s, nvme",
        "lenders",
    )
    return "\n\n".join(
        [
            f"One job with {result['state_bytes'] / 2**20:.0f} MiB of states and a host budget of {HOST_BUDGET}, "
            "whose daemon borrows memory of two others, each in a network namespace. A daemon without lenders trains "
            f"the same model in turns ({result['pairs']} pairs of {result['steps']} steps); the ratio is the time with "
            "lenders by the time without. The speeds are those that the daemon measured: bytes read over the time in "
            f"which a read was under way. {limit} All daemons and ranks share the processors of one machine, and both "
            "sides its disk, so the network's work in Python competes with the computation, which on nodes of their "
            "own it does not.",
            "The borrower authenticates each block of 128 KiB that it sends and reads: one thread seals "
            f"{result['codes']['sealed']} GB/s and checks {result['codes']['checked']} GB/s, where the checksums "
            f"of the same blocks are verified at {result['codes']['checksums']} GB/s.",
            report.table(header, rows),
        ]
    )


@app.command(help=__doc__)
def main(
    quick: Annotated[bool, typer.Option("--quick", help="One link and a small model: to see that it works.")] = False,
    pairs: Annotated[int, typer.Option(help="Pairs of stretches after the first.", min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    arguments = argparse.Namespace(width=1024, layers=24, batch=64, steps=4, pairs=pairs)
    if quick:
        arguments = argparse.Namespace(width=512, layers=4, batch=16, steps=2, pairs=1)
    report.run(
        "remote",
        "States in the memory of other nodes",
        "bench-remote",
        lambda: measure(LINKS[:1] if quick else LINKS, arguments),
        markdown,
        directory=ROOT,
        as_json=as_json,
        results=results,
        errors=(NamespaceError,),
    )


if __name__ == "__main__":
    app()
