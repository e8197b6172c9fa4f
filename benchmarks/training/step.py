"""Measures a training step: plain PyTorch in memory, this project on each placement, and DeepSpeed, taking turns.

All contestants train the same GPT-2 on the same data, in bf16 with fp32 master weights and moments, with AdamW. Memory
cannot hold all of them at once, so they run in heats, each beside plain PyTorch: `nvme`, `host`, `device`, and `malloc`
(with glibc's malloc by default, and as docs/performance.md sets it). The result is one JSON object:

- `machine`, `provenance`, `parameters`
- `heats`: by name, the figures of each contestant (`benchmarks.training.result`)
- `targets`: `name`, `measured`, `wanted` (at most) and `met`; they are meant for the default model

The benchmark fails if this project's losses are not plain PyTorch's, bit for bit.

Run as a module from the root of the repository: `python -m benchmarks.training.step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from benchmarks.common import machine, report
from benchmarks.common.measure import Progress, Threads, prefixed
from benchmarks.training import bf16_emulation, tables
from benchmarks.training.contestant_process import RunningContestant
from benchmarks.training.deepspeed_environment import DeepSpeedEnvironment, DeepSpeedUnavailableError, prepare
from benchmarks.training.entries import PLAIN, TUNED_MALLOC, deepspeed, ours
from benchmarks.training.heat import Heat
from benchmarks.training.result import summaries, targets
from benchmarks.training.task import HEAD_WIDTH, TrainingTask

BUILD = Path(__file__).parents[2] / "build"
MIB = 1 << 20
# Disk space of all contestants of a heat, which keep two versions each.
DISK_BYTES_PER_PARAMETER = 100
LEAST_DISK_BYTES = 4 << 30

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


class HeatName(StrEnum):
    """The heats; each stands for the contestants that run beside each other."""

    NVME = "nvme"
    HOST = "host"
    DEVICE = "device"
    MALLOC = "malloc"


def entries_of(heat: HeatName, task: TrainingTask, nvme_host_budget_bytes: int) -> list[RunningContestant]:
    """Return the contestants of a heat that run in this project's environment."""
    size = task.gpt2_parameters
    nvme = ours("nvme", task, size, "nvme", durability="step", host_budget_bytes=nvme_host_budget_bytes)
    match heat:
        case HeatName.NVME:
            return [PLAIN, nvme]
        case HeatName.MALLOC:
            return [PLAIN, nvme, *(_with_tuned_malloc(entry) for entry in (PLAIN, nvme))]
        case HeatName.HOST:
            return [PLAIN, ours("host", task, size, "host", durability="none")]
        case HeatName.DEVICE:
            return [
                PLAIN,
                ours("host, durable", task, size, "host", durability="step"),
                ours("device", task, size, "device", durability="none"),
            ]


def _with_tuned_malloc(entry: RunningContestant) -> RunningContestant:
    return replace(entry, name=f"{entry.name}, tuned malloc", environment=TUNED_MALLOC)


def peers_of(
    heat: HeatName, task: TrainingTask, environment: DeepSpeedEnvironment | str | None
) -> tuple[list[RunningContestant], dict[str, Any]]:
    """Return DeepSpeed's entries in a heat, and the figures that say why DeepSpeed cannot be run; one of them is empty.

    Args:
        environment: DeepSpeed's environment, or the reason why there is none; None: DeepSpeed was not asked for.
    """
    if environment is None or heat in (HeatName.DEVICE, HeatName.MALLOC):
        return [], {}
    home: Literal["cpu", "nvme"] = "nvme" if heat is HeatName.NVME else "cpu"
    name = f"DeepSpeed {home}"
    problem = environment if isinstance(environment, str) else environment.nvme_problem if home == "nvme" else None
    if problem is not None:
        return [], {name: {"not_run": problem}}
    assert isinstance(environment, DeepSpeedEnvironment)
    return [deepspeed(name, task, task.gpt2_parameters, home, environment)], {}


def measure(
    task: TrainingTask,
    heats: Sequence[HeatName],
    *,
    directory: Path,
    rounds: int,
    steps: int,
    nvme_host_budget_bytes: int,
    threads: Threads,
    environment: DeepSpeedEnvironment | str | None,
    progress: Progress,
) -> dict[str, Any]:
    """Run all heats, and return the result; see the module.

    Raises:
        BenchmarkError: a contestant that is not optional failed, or this project's losses are wrong.
    """
    result: dict[str, Any] = {
        "parameters": asdict(task)
        | {"parameters": task.gpt2_parameters, "precision": bf16_emulation.precision_in_words()}
        | {"rounds": rounds, "steps": steps}
        | {"nvme_host_budget_bytes": nvme_host_budget_bytes, "probe_threads": asdict(threads)},
    }
    found: dict[str, Mapping[str, Any]] = {}
    for name in heats:
        peers, absent = peers_of(name, task, environment)
        heat = Heat(task, directory, threads=threads, progress=prefixed(progress, name))
        entries = [*entries_of(name, task, nvme_host_budget_bytes), *peers]
        found[name] = summaries(heat.run(entries, rounds=rounds, steps=steps), task) | absent
    return result | {"heats": found, "targets": targets(found)}


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = BUILD / "bench",
    layers: Annotated[int, typer.Option(min=1)] = 12,
    hidden: Annotated[int, typer.Option(min=HEAD_WIDTH, help=f"A multiple of {HEAD_WIDTH}.")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a sequence.")] = 256,
    vocab: Annotated[int, typer.Option(min=1)] = 512,
    clip: Annotated[float, typer.Option(min=0, help="Limit of the gradient's norm; 0: none.")] = 0.0,
    nvme_host_budget_mib: Annotated[int, typer.Option(min=1, help="Host memory of `nvme`.")] = 512,
    heats: Annotated[list[HeatName] | None, typer.Option("--heat", help="Only this one; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the warm-up.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a turn; the first does not count.")] = 3,
    read_threads: Annotated[int, typer.Option(min=1, help="Threads of the disk probe that read.")] = Threads().read,
    write_threads: Annotated[int, typer.Option(min=1, help="Threads of the disk probe that write.")] = Threads().write,
    deepspeed_dir: Annotated[
        Path | None, typer.Option("--deepspeed", help="DeepSpeed's environment, set up if need be; none: without it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, one round: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not tables.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    if hidden % HEAD_WIDTH:
        raise typer.BadParameter(f"--hidden is {hidden}, and has to be a multiple of {HEAD_WIDTH}")
    task = TrainingTask(layers=layers, hidden=hidden, batch=batch, tokens=tokens, vocab=vocab, clip=clip)
    if quick:
        task = TrainingTask(layers=2, hidden=HEAD_WIDTH, batch=2, tokens=32, vocab=512, clip=clip)
        rounds, steps, nvme_host_budget_mib = 1, 2, 32

    def run_heats() -> dict[str, Any]:
        needed = max(LEAST_DISK_BYTES, DISK_BYTES_PER_PARAMETER * task.gpt2_parameters)
        machine.check_free_bytes(directory, needed, "the benchmark")
        return measure(
            task,
            heats or list(HeatName),
            directory=directory,
            rounds=rounds,
            steps=steps,
            nvme_host_budget_bytes=nvme_host_budget_mib * MIB,
            threads=Threads(read=read_threads, write=write_threads),
            environment=_environment(deepspeed_dir, console.print),
            progress=console.print,
        )

    report.run(
        "step",
        "A training step",
        "bench-step",
        run_heats,
        tables.markdown,
        directory=directory,
        as_json=as_json,
        results=results,
    )


def _environment(directory: Path | None, progress: Progress) -> DeepSpeedEnvironment | str | None:
    """Return DeepSpeed's environment, or the reason why there is none; None if DeepSpeed was not asked for."""
    if directory is None:
        return None
    try:
        return prepare(directory, progress)
    except DeepSpeedUnavailableError as error:
        return f"cannot be set up: {error}"


if __name__ == "__main__":
    app()
