"""Measures how the cost of a step grows with the model: everything on NVMe, from 50 million to 1.3 billion parameters.

The model is GPT-2 with a vocabulary of 50257, the batch one sequence of 256 tokens. The host budget grows with the
model, and is 4 GiB at 1.3 billion parameters. Of this project, no process ever holds a whole model. The other
contestant is `compute`, forward and backward alone in bf16, a lower bound for every training. The result is one JSON
object:

- `machine`, `provenance`, `parameters`
- `sizes`: `parameters`, `layers`, `hidden`, `host_budget_bytes`, and the figures of `compute` and `nvme`
  (`benchmarks.training.result`; their ratios are to `compute`)
- `growth`: by figure, its growth from the smallest to the largest model, divided by the growth of the number of
  parameters; 1 is linear

Run as a module from the root of the repository: `python -m benchmarks.training.scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import plots
from benchmarks.common import machine, report
from benchmarks.common.measure import Progress, Threads, prefixed
from benchmarks.training import bf16_emulation
from benchmarks.training.entries import COMPUTE, ours
from benchmarks.training.heat import Heat
from benchmarks.training.result import summaries
from benchmarks.training.task import HEAD_WIDTH, TrainingTask

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
GB = 1e9
GIB = 1 << 30
# The host budget of the largest model (24 layers x 2048) is 4 GiB with this.
HOST_BYTES_PER_PARAMETER = 3.28
LEAST_HOST_BYTES = 256 << 20
DISK_BYTES_PER_PARAMETER = 44

FULL = tuple(
    TrainingTask(layers=layers, hidden=hidden, batch=1, tokens=256, vocab=50257)
    for layers, hidden in ((8, 512), (16, 768), (22, 1280), (24, 2048))
)
QUICK = tuple(TrainingTask(layers=layers, hidden=HEAD_WIDTH, batch=1, tokens=32, vocab=512) for layers in (1, 2))

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def host_budget_bytes(task: TrainingTask) -> int:
    """Return the host budget of a task, rounded down to whole MiB."""
    return max(LEAST_HOST_BYTES, int(task.gpt2_parameters * HOST_BYTES_PER_PARAMETER) >> 20 << 20)


def measure(
    tasks: Sequence[TrainingTask], directory: Path, *, rounds: int, steps: int, progress: Progress
) -> dict[str, Any]:
    """Measure all sizes, one after the other, and return the result; see the module. It can raise BenchmarkError."""
    sizes = []
    for task in tasks:
        size, budget = task.gpt2_parameters, host_budget_bytes(task)
        needed, model = DISK_BYTES_PER_PARAMETER * size, f"a model of {size} parameters"
        machine.check_free_bytes(directory, needed, model, "choose another one, or fewer --sizes")
        nvme = ours("nvme", task, size, "nvme", durability="step", host_budget_bytes=budget, deferred=True)
        heat = Heat(task, directory, threads=Threads(), progress=prefixed(progress, f"{size / 1e6:.1f} M"))
        found = summaries(heat.run([COMPUTE, nvme], rounds=rounds, steps=steps), task)
        about = {"parameters": size, "layers": task.layers, "hidden": task.hidden, "host_budget_bytes": budget}
        sizes.append(about | found)
    return {
        "parameters": {"rounds": rounds, "steps": steps, "batch": tasks[0].batch, "tokens": tasks[0].tokens}
        | {"precision": bf16_emulation.precision_in_words()},
        "sizes": sizes,
        "growth": _growth(sizes[0], sizes[-1]),
    }


def _growth(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    larger = last["parameters"] / first["parameters"]
    return {
        "seconds": round(last["nvme"]["median"] / first["nvme"]["median"] / larger, 4),
        "memory": round(last["nvme"]["memory"]["total"] / first["nvme"]["memory"]["total"] / larger, 4),
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    rows = [
        [
            f"{size['layers']} x {size['hidden']}",
            f"{size['parameters'] / 1e6:.0f} M",
            f"{size['host_budget_bytes'] / GIB:.2f}",
            f"{size['nvme']['median']:.2f}",
            f"{size['compute']['median']:.2f}",
            f"{size['nvme']['roofline']['io'] or 0.0:.2f}",
            f"{size['nvme']['roofline']['fraction']:.2f}",
            f"{size['nvme']['memory']['trainer'] / GIB:.2f}",
            f"{size['nvme']['memory']['daemon'] / GIB:.2f}",
            f"{size['nvme']['memory']['total'] / GIB:.2f}",
            f"{size['nvme']['read_per_step'] / GB:.1f}",
            f"{size['nvme']['written_per_step'] / GB:.1f}",
        ]
        for size in result["sizes"]
    ]
    header = (
        *("layers", "parameters", "budget, GiB", "s/step", "compute, s", "I/O, s", "T_roof / T_step"),
        *("trainer, GiB", "daemon, GiB", "both, GiB", "GB read", "GB written"),
    )
    shape = result["parameters"]
    return "\n\n".join(
        (
            f"GPT-2 with a vocabulary of 50257, {shape['batch']} x {shape['tokens']} tokens, {shape['precision']}, "
            "AdamW; everything on NVMe, each step durable, built under `zero.Init`. `compute` is forward and backward "
            "alone, in memory; `I/O` the disk alone with the bytes of a step, in both directions "
            "at once, the better of what it took right before and right after a turn; T_roof the larger one. Memory is "
            "proportional (PSS), the largest that was seen.",
            report.table(header, rows),
            f"From the smallest to the largest, seconds grow {result['growth']['seconds']:.2f} times as much as the "
            f"parameters, memory {result['growth']['memory']:.2f} times.",
            "![seconds per step and memory over parameters](results/scale.svg)",
        )
    )


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = DEFAULT_DIRECTORY,
    sizes: Annotated[int, typer.Option(min=1, max=len(FULL), help="How many, from the smallest on.")] = len(FULL),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the warm-up.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a turn; the first does not count.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, one round: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    tasks, rounds, steps = (QUICK, 1, 2) if quick else (FULL[:sizes], rounds, steps)
    result = report.run(
        "scale",
        "Cost by size of the model",
        "bench-scale",
        lambda: measure(tasks, directory, rounds=rounds, steps=steps, progress=console.print),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
    )
    if results:
        plots.draw("scale", result, report.HERE / "results" / "scale.svg")


if __name__ == "__main__":
    app()
