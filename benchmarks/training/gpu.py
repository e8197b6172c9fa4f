"""Measures a training step on a GPU: plain PyTorch on the card, this project, FSDP2 with CPU offload, and DeepSpeed.

All contestants train the same GPT-2 on the same data, in bf16 with fp32 master weights and moments, with AdamW, and
take turns on one GPU. The copies between host and device are measured alone, from pinned memory of torch. The result is
one JSON object:

- `machine`, `provenance`, `parameters`, `gpu`
- `links`: bytes per second to the device, from it, and of both at once; null on the CPU
- `contestants`: by name, the figures of each contestant (`benchmarks.training.result`; ratios are to plain PyTorch)
- `roofline`: for `host`, the least seconds of a step that each resource needs: `compute` (forward and backward alone),
  `to_device` and `from_device` (the step's bytes at the links' rates), `update` (the daemon's CPU seconds, divided by
  the CPUs); `seconds` is the largest
- `targets`: `name`, `measured`, `wanted` (at most) and `met`; they are meant for the default model

Run as a module from the root of the repository: `python -m benchmarks.training.gpu`. On a machine without a GPU,
`--device cpu --quick` shows that it works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.common import machine, report
from benchmarks.common.measure import BenchmarkError, Progress, Threads
from benchmarks.training.contestant_process import RunningContestant
from benchmarks.training.deepspeed_environment import DeepSpeedUnavailableError, prepare
from benchmarks.training.entries import COMPUTE, PLAIN, deepspeed, ours
from benchmarks.training.heat import Heat
from benchmarks.training.result import summaries
from benchmarks.training.task import HEAD_WIDTH, TrainingTask

BUILD = Path(__file__).parents[2] / "build"
GB = 1e9
MIB = 1 << 20
# Large enough for the full rate of a link, small enough to be pinned quickly.
LINK_BYTES = 256 * MIB
LINK_TURNS = 5
# Disk space of a contestant on NVMe.
DISK_BYTES_PER_PARAMETER = 60
WANTED_OF_ROOFLINE = 1.15
# The contestants that the ratios and the roofline are computed from.
NEEDED = ("plain", "compute", "host")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def links(device: str) -> dict[str, float] | None:
    """Return the rates of copies between pinned memory and the device in bytes per second; None on the CPU."""
    if device == "cpu":
        return None
    host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    card = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    side = torch.Stream(device=device)

    def seconds(act: Callable[[], None]) -> float:
        """Return the shortest time of some turns, each until the device has done it."""
        turns = []
        for _ in range(LINK_TURNS):
            torch.accelerator.synchronize()
            began = time.perf_counter()
            act()
            torch.accelerator.synchronize()
            turns.append(time.perf_counter() - began)
        return min(turns)

    def into() -> None:
        card[0].copy_(host[0], non_blocking=True)

    def out_of() -> None:
        with side:
            host[1].copy_(card[1], non_blocking=True)

    def both() -> None:
        into()
        out_of()

    return {
        "to_device": LINK_BYTES / seconds(into),
        "from_device": LINK_BYTES / seconds(out_of),
        "both": 2 * LINK_BYTES / seconds(both),
    }


def entries_of(
    task: TrainingTask, device: str, deepspeed_dir: Path | None, progress: Progress
) -> list[RunningContestant]:
    """Return all contestants. Those of others are left out of the result, with the reason, where they cannot be run."""
    size = task.gpt2_parameters
    own = [
        PLAIN,
        COMPUTE,
        ours("host", task, size, "host", durability="none"),
        ours("nvme", task, size, "nvme", durability="step"),
        ours("device", task, size, "device", durability="none"),
        RunningContestant(name="FSDP2 CPU offload", kind="fsdp", optional=True),
    ]
    if deepspeed_dir is not None:
        try:
            own.append(deepspeed("DeepSpeed cpu", task, size, "cpu", prepare(deepspeed_dir, progress, device)))
        except DeepSpeedUnavailableError as error:
            progress(f"DeepSpeed cannot be set up: {error}")
    return [replace(entry, device=device) for entry in own]


def roofline(contestants: Mapping[str, Mapping[str, Any]], rates: Mapping[str, float] | None) -> dict[str, float]:
    """Return the least seconds that each resource needs for a step of `host`; see the module."""
    host = contestants["host"]
    moved = host["facts"]["report"]["bytes"]
    found = {
        "compute": contestants["compute"]["median"],
        "update": host["cpu_per_step"]["daemon"] / len(os.sched_getaffinity(0)),
    }
    if rates is not None:
        found["to_device"] = moved["store_to_trainer"] / rates["to_device"]
        found["from_device"] = moved["trainer_to_store"] / rates["from_device"]
    return found | {"seconds": max(found.values())}


def measure(
    task: TrainingTask,
    entries: Sequence[RunningContestant],
    directory: Path,
    *,
    rounds: int,
    steps: int,
    progress: Progress,
) -> dict[str, Any]:
    """Run the heat, and return the result; see the module.

    Raises:
        BenchmarkError: a contestant of this project failed.
    """
    device = entries[0].device
    rates = links(device)
    heat = Heat(task, directory, threads=Threads(), progress=progress, together=device != "cpu")
    found = summaries(heat.run(entries, rounds=rounds, steps=steps), task)
    roof = roofline(found, rates)
    value = found["host"]["median"] / roof["seconds"]
    return {
        "parameters": asdict(task) | {"parameters": task.gpt2_parameters, "rounds": rounds, "steps": steps},
        "gpu": None if device == "cpu" else torch.get_device_module(device).get_device_name(),
        "links": rates,
        "contestants": found,
        "roofline": roof,
        "targets": [
            {
                "name": "host: step / roofline",
                "measured": round(value, 4),
                "wanted": WANTED_OF_ROOFLINE,
                "met": value <= WANTED_OF_ROOFLINE,
            }
        ],
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown tables."""
    task = result["parameters"]
    introduction = (
        f"{result['gpu'] or 'CPU'}. GPT-2 of {task['layers']} layers x {task['hidden']} "
        f"({task['parameters'] / 1e6:.1f} M parameters), {task['batch']} x {task['tokens']} tokens, bf16 with fp32 "
        "master weights and moments, AdamW. Contestants took turns; `ratio` is to plain PyTorch's step in the same "
        "round."
    )
    rows = [
        [
            f"`{name}`",
            f"{figures['median']:.3f}",
            f"{figures['ratio']:.2f}",
            f"{figures['tokens_per_second']:.0f}",
            f"{figures['memory']['total'] / MIB:.0f}",
            *([f"{peak / MIB:.0f}"] if (peak := figures["facts"].get("device_peak_bytes")) else [None]),
        ]
        for name, figures in result["contestants"].items()
        if figures["not_run"] is None
    ]
    steps = report.table(["contestant", "s per step", "ratio", "tokens/s", "host MiB", "device MiB"], rows)
    absent = [
        f"`{name}` was not run: {figures['not_run']}"
        for name, figures in result["contestants"].items()
        if figures["not_run"] is not None
    ]
    roof = report.table(
        ["resource", "s of a step of `host`"], [[name, f"{value:.4f}"] for name, value in result["roofline"].items()]
    )
    rates = result["links"]
    shown = ", ".join(f"{name.replace('_', ' ')} {rate / GB:.1f}" for name, rate in rates.items()) if rates else "none"
    targets = report.table(
        ["target", "measured", "wanted, at most", "met"],
        [[one["name"], one["measured"], one["wanted"], "yes" if one["met"] else "no"] for one in result["targets"]],
    )
    return "\n\n".join([introduction, steps, *absent, f"Links, GB/s from pinned memory: {shown}.", roof, targets])


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = BUILD / "bench",
    device: Annotated[str, typer.Option(help="The kind of device that computes.")] = "cuda",
    layers: Annotated[int, typer.Option(min=1)] = 24,
    hidden: Annotated[int, typer.Option(min=HEAD_WIDTH, help=f"A multiple of {HEAD_WIDTH}.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a sequence.")] = 2048,
    vocab: Annotated[int, typer.Option(min=1)] = 50257,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the warm-up.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a turn; the first does not count.")] = 4,
    deepspeed_dir: Annotated[
        Path | None, typer.Option("--deepspeed", help="An environment that has DeepSpeed; none: without it.")
    ] = None,
    left_out: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NAME", help="A contestant to leave out, as nvme; repeatable."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, one round: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not tables.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    task = TrainingTask(layers=layers, hidden=hidden, batch=batch, tokens=tokens, vocab=vocab)
    if quick:
        task, rounds, steps = TrainingTask(layers=2, hidden=HEAD_WIDTH, batch=2, tokens=32, vocab=512), 1, 2

    def run_heat() -> dict[str, Any]:
        if hidden % HEAD_WIDTH:
            raise BenchmarkError(f"--hidden is {hidden}, and has to be a multiple of {HEAD_WIDTH}")
        if device != "cpu" and not torch.get_device_module(device).is_available():
            raise BenchmarkError(f"--device is {device!r}, and torch finds none here; --device cpu --quick needs none")
        entries = entries_of(task, device, deepspeed_dir, console.print)
        names = [entry.name for entry in entries]
        for name in left_out or []:
            if name not in names or name in NEEDED:
                others = ", ".join(name for name in names if name not in NEEDED)
                raise BenchmarkError(f"--without is {name!r}; these can be left out: {others}")
        entries = [entry for entry in entries if entry.name not in (left_out or [])]
        if any(entry.name == "nvme" for entry in entries):
            machine.check_free_bytes(directory, DISK_BYTES_PER_PARAMETER * task.gpt2_parameters, "the benchmark")
        return measure(task, entries, directory, rounds=rounds, steps=steps, progress=console.print)

    report.run(
        "gpu",
        "A training step on a GPU",
        "bench-gpu",
        run_heat,
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
    )


if __name__ == "__main__":
    app()
