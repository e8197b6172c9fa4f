"""A forward and a short generation with weights from the store, beside plain PyTorch and Accelerate's `disk_offload`.

The contestants are processes that take turns. The store has a host budget of a fifth of the model, then one that holds
the whole model; at the end several processes compute at once, and their memory is measured together with the daemon's.
The files of `disk_offload` are in the page cache, which no budget limits here; beside the store with a fifth,
`disk_offload_uncached` shows what it takes on a machine without memory for them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from safetensors.torch import save_model
from transformers import GPT2LMHeadModel

from benchmarks.common import report
from benchmarks.common.machine import ROOT
from benchmarks.common.measure import BenchmarkError, Progress
from benchmarks.common.store_daemon import started
from benchmarks.inference.contestant import config_of
from benchmarks.training import bf16_emulation
from trainer_client.errors import TrainerClientError

app = typer.Typer(add_completion=False)
DEFAULT_DIRECTORY = Path("build/bench-inference")
MODEL_SEED = 0
LEAST_BUDGET_BYTES = 8 << 20
WAYS = ("plain", "disk_offload", "store")
WAYS_UNDER_LIMIT = ("plain", "disk_offload", "disk_offload_uncached", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The model and what is computed with it."""

    layers: int = 24
    width: int = 1024
    # A processor without instructions for bf16 multiplies matrices in bf16 some hundred times slower than in fp32.
    dtype: str = "float32" if bf16_emulation.need_fp32() else "bfloat16"
    vocabulary: int = 256
    positions: int = 256
    tokens: int = 128
    new_tokens: int = 4
    forwards: int = 1
    rounds: int = 3
    processes: int = 4


QUICK = Size(layers=8, width=128, tokens=16, new_tokens=3, forwards=1, rounds=1, processes=2)


class Contestant:
    """A contestant's process."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """Start the process; `wait` returns when its model is ready."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.inference.contestant", json.dumps(spec)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def wait(self) -> dict[str, Any]:
        """Return the next answer. Raise BenchmarkError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            raise BenchmarkError(f"a contestant ended: {self._process.stderr.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, **order: int) -> None:
        """Send an order; `wait` returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run(size: Size, directory: Path, progress: Progress) -> dict[str, Any]:
    """Run all parts in `directory`, and return the result."""
    progress("making the model")
    torch.manual_seed(MODEL_SEED)
    model = GPT2LMHeadModel(config_of(asdict(size))).to(getattr(torch, size.dtype))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    checkpoint = directory / "model"
    checkpoint.mkdir()
    save_model(model, str(checkpoint / "model.safetensors"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    spec = {**asdict(size), "checkpoint": str(checkpoint), "offload_dir": str(directory / "offload")}
    spec["threads"] = len(os.sched_getaffinity(0))
    # By default, weights take three quarters of a daemon's host budget.
    budgets = {"fifth": max(nbytes // 5, LEAST_BUDGET_BYTES), "whole": max(nbytes * 7 // 5, LEAST_BUDGET_BYTES)}
    turns, together = {}, {}
    for name, budget in budgets.items():
        (directory / name).mkdir()
        with started(directory / name, {"host_budget": budget, "nvme_budget": nbytes * 4 + (1 << 28)}) as daemon:
            store = {"way": "store", "address": daemon.socket_address}
            ways = WAYS_UNDER_LIMIT if name == "fifth" else WAYS
            turns[name] = _in_turns(spec, store, ways, size, name, progress)
            if name == "whole":
                for way in WAYS:
                    progress(f"{size.processes} processes: {way}")
                    together[way] = _at_once(spec | store | {"way": way}, size, daemon.pid if way == "store" else None)
    _check_digests([*turns.values(), together])
    return {
        "model": {"parameters": parameters, "bytes": nbytes, **asdict(size)},
        "budgets": budgets,
        "turns": turns,
        "together": together,
    }


@contextmanager
def _running(specs: Sequence[Mapping[str, Any]]) -> Iterator[list[Contestant]]:
    with ExitStack() as stack:
        running = []
        for spec in specs:
            contestant = Contestant(spec)
            stack.callback(contestant.stop)
            running.append(contestant)
        for contestant in running:
            contestant.wait()
        yield running


def _in_turns(
    spec: Mapping[str, Any],
    store: Mapping[str, Any],
    ways: Sequence[str],
    size: Size,
    name: str,
    progress: Progress,
) -> dict[str, dict[str, Any]]:
    """Return the seconds of each way's forwards and generations, and their ratios to plain PyTorch's in that round."""
    forwards: dict[str, list[float]] = {way: [] for way in ways}
    generations: dict[str, list[float]] = {way: [] for way in ways}
    digests: dict[str, str] = {}
    progress(f"{name}: starting")
    with _running([{**spec, **store, "way": way} for way in ways]) as running:
        for number in range(size.rounds + 1):
            progress(f"{name}: " + (f"round {number} of {size.rounds}" if number else "warm-up"))
            for way, contestant in zip(ways, running, strict=True):
                contestant.order(forwards=size.forwards)
                answer = contestant.wait()
                digests[way] = answer["digest"]
                contestant.order(generate=size.new_tokens)
                generated = contestant.wait()
                if number:
                    forwards[way].append(statistics.median(answer["seconds"]))
                    generations[way].append(generated["seconds"][0])
    return {
        way: {
            "forward": _compared(forwards[way], forwards["plain"]),
            "generate": _compared(generations[way], generations["plain"]),
            "digest": digests[way],
        }
        for way in ways
    }


def _at_once(spec: Mapping[str, Any], size: Size, daemon: int | None) -> dict[str, Any]:
    """Return the seconds of a forward while several processes compute, and the memory of all of them."""
    # Each process has an equal part of the cores.
    threads = max(1, int(spec["threads"]) // size.processes)
    own = [
        {**spec, "threads": threads, "offload_dir": f"{spec['offload_dir']}-{number}"}
        for number in range(size.processes)
    ]
    seconds: list[float] = []
    with _running(own) as running:
        digests = set()
        for number in range(size.rounds + 1):
            for contestant in running:
                contestant.order(forwards=size.forwards)
            for contestant in running:
                answer = contestant.wait()
                digests.add(answer["digest"])
                if number:
                    seconds += answer["seconds"]
        pids = [contestant.pid for contestant in running] + ([] if daemon is None else [daemon])
        memory = [psutil.Process(pid).memory_full_info() for pid in pids]
    if len(digests) != 1:
        raise BenchmarkError("processes with the same weights computed different logits")
    return {
        "seconds": [round(each, 4) for each in seconds],
        "median_seconds": round(statistics.median(seconds), 4),
        # Pages of files, as those of an offloaded checkpoint, count as far as they are mapped.
        "pss_bytes": sum(int(each.pss) for each in memory),
        "daemon_pss_bytes": 0 if daemon is None else int(memory[-1].pss),
        "digest": digests.pop(),
    }


def _compared(seconds: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    ratios = [own / other for own, other in zip(seconds, plain, strict=True)]
    return {
        "seconds": [round(each, 4) for each in seconds],
        "median_seconds": round(statistics.median(seconds), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def _check_digests(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise BenchmarkError if a way computed other logits than plain PyTorch with the same number of threads."""
    for part in parts:
        if len({case["digest"] for case in part.values()}) != 1:
            raise BenchmarkError(f"the logits differ: { {way: case['digest'][:8] for way, case in part.items()} }")


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    model = result["model"]
    rows: list[list[object]] = []
    for budget, title in (("fifth", "a fifth of the model"), ("whole", "the whole model")):
        for way, case in result["turns"][budget].items():
            forward, generate = case["forward"], case["generate"]
            rows.append(
                [
                    f"{way}, host budget {title}" if way == "store" else way,
                    f"{forward['median_seconds']:.2f}",
                    f"{forward['ratio']:.2f} ({min(forward['ratios']):.2f} to {max(forward['ratios']):.2f})",
                    f"{generate['median_seconds']:.2f}",
                    f"{generate['ratio']:.2f}",
                ]
            )
    together = [
        [way, f"{case['median_seconds']:.2f}", f"{case['pss_bytes'] / 1e6:,.0f}"]
        for way, case in result["together"].items()
    ]
    return "\n\n".join(
        [
            f"GPT-2 of {model['parameters'] / 1e6:.0f} M parameters in {model['dtype']} "
            f"({model['bytes'] / 1e6:.0f} MB), batch 1 of {model['tokens']} tokens; `generate` makes "
            f"{model['new_tokens']} tokens more. Ratios are to plain PyTorch in the same round. All contestants "
            "computed the same logits, bit for bit. `disk_offload` reads from the page cache here; "
            "`disk_offload_uncached` and the store read from the device.",
            report.table(("way", "forward, s", "/ plain", "generate, s", "/ plain"), rows),
            f"{model['processes']} processes at once; the memory (PSS) is that of all processes and of the daemon:",
            report.table(("way", "forward, s", "memory, MB"), together),
        ]
    )


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go; they are removed.")] = DEFAULT_DIRECTORY,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)

    def measure() -> dict[str, Any]:
        with console.status("starting") as status, tempfile.TemporaryDirectory(dir=directory) as scratch:
            return run(QUICK if quick else Size(), Path(scratch).absolute(), status.update)

    report.run(
        "inference",
        "Inference",
        "bench-inference",
        measure,
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        errors=(TrainerClientError,),
    )


if __name__ == "__main__":
    app()
