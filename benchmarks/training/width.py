"""Measures a step of a model whose largest layer is four times the host budget, and whose logits would take 1 GiB.

The model is GPT-2 of one block with a vocabulary of 131,072 and a width of 4,096, so that its tied weight of embedding
and head has 1 GiB in bf16; the batch has 2,048 tokens. Layers are in tiles (`paramserver.tiling`), the loss is computed
in chunks, and everything is on NVMe. The other contestant is `compute`, forward and backward alone, in memory. The
result is one JSON object:

- `machine`, `provenance`, `parameters`
- `layer_bytes`, `logits_bytes`, `host_budget_bytes`: of the largest weight in bf16, of the logits in fp32, of the store
- `compute`, `tiled`: their figures (`benchmarks.training.result`; ratios are to `compute`)

Run as a module from the root of the repository: `python -m benchmarks.training.width`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.common import machine, report
from benchmarks.common.measure import Progress, Threads
from benchmarks.training import bf16_emulation
from benchmarks.training.entries import COMPUTE, ours
from benchmarks.training.heat import Heat
from benchmarks.training.result import summaries
from benchmarks.training.task import HEAD_WIDTH, TrainingTask

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
MIB = 1 << 20
DISK_BYTES_PER_PARAMETER = 44
BF16_BYTES = 2
FP32_BYTES = 4

FULL = TrainingTask(layers=1, hidden=4096, batch=2, tokens=1024, vocab=131072)
QUICK = TrainingTask(layers=1, hidden=HEAD_WIDTH, batch=1, tokens=32, vocab=8192)
# A quarter of the largest layer.
FULL_BUDGET_BYTES = FULL.largest_parameter * BF16_BYTES // 4
QUICK_BUDGET_BYTES = 32 * MIB
# The tiles and chunks of each task. Four tiles have to fit into the host budget beside the optimizer's buffers.
FULL_TILING = {"largest_tile": 8 * MIB, "loss_tokens": 256}
QUICK_TILING = {"largest_tile": MIB // 8, "loss_tokens": 8}


def measure(
    task: TrainingTask,
    directory: Path,
    *,
    host_budget_bytes: int,
    tiling: dict[str, int],
    rounds: int,
    steps: int,
    progress: Progress,
) -> dict[str, Any]:
    """Measure both contestants, and return the result; see the module. It can raise BenchmarkError."""
    size = task.gpt2_parameters
    machine.check_free_bytes(directory, DISK_BYTES_PER_PARAMETER * size, f"a model of {size} parameters")
    tiled = ours(
        "tiled",
        task,
        size,
        "nvme",
        durability="step",
        host_budget_bytes=host_budget_bytes,
        deferred=True,
        tiling=tiling,
    )
    found = summaries(
        Heat(task, directory, threads=Threads(), progress=progress).run([COMPUTE, tiled], rounds=rounds, steps=steps),
        task,
    )
    return {
        "parameters": {
            "rounds": rounds,
            "steps": steps,
            "batch": task.batch,
            "tokens": task.tokens,
            "hidden": task.hidden,
            "vocab": task.vocab,
            "precision": bf16_emulation.precision_in_words(),
            **tiling,
        },
        "layer_bytes": task.largest_parameter * BF16_BYTES,
        "logits_bytes": task.tokens_per_step * task.vocab * FP32_BYTES,
        "host_budget_bytes": host_budget_bytes,
        **found,
    }


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    shape, tiled = result["parameters"], result["tiled"]
    rows = [
        [
            name,
            f"{figures['median']:.2f}",
            f"{figures['memory']['trainer'] / MIB:.0f}",
            f"{figures['memory']['daemon'] / MIB:.0f}",
            f"{figures['memory']['total'] / MIB:.0f}",
        ]
        for name, figures in (("compute", result["compute"]), ("tiled", tiled))
    ]
    return "\n\n".join(
        (
            f"GPT-2 of one block, width {shape['hidden']}, vocabulary {shape['vocab']}, {shape['batch']} x "
            f"{shape['tokens']} tokens, {shape['precision']}, AdamW; everything on NVMe, each step durable. The tied "
            f"weight has {result['layer_bytes'] / MIB:.0f} MiB, the logits would have "
            f"{result['logits_bytes'] / MIB:.0f} MiB, and the host budget is {result['host_budget_bytes'] / MIB:.0f} "
            f"MiB. Tiles of at most {shape['largest_tile'] / MIB:.2f} MiB, logits of {shape['loss_tokens']} tokens at "
            "once. `compute` is forward and backward alone, in memory. Memory is proportional (PSS), the largest that "
            "was seen.",
            report.table(("", "s/step", "trainer, MiB", "daemon, MiB", "both, MiB"), rows),
            f"A step takes {tiled['ratio']:.2f} times as long as `compute`, reads "
            f"{tiled['read_per_step'] / 1e9:.2f} GB and writes {tiled['written_per_step'] / 1e9:.2f} GB.",
        )
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = DEFAULT_DIRECTORY,
    host_budget: Annotated[
        int, typer.Option(min=1, help="Bytes of the store's host budget: by default a quarter of the layer.")
    ] = FULL_BUDGET_BYTES,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the warm-up.")] = 1,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a turn; the first does not count.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, one round: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    task, tiling = (QUICK, QUICK_TILING) if quick else (FULL, FULL_TILING)
    if quick:
        host_budget, rounds, steps = QUICK_BUDGET_BYTES, 1, 2
    report.run(
        "width",
        "A layer of four times the host budget",
        "bench-width",
        lambda: measure(
            task,
            directory,
            host_budget_bytes=host_budget,
            tiling=tiling,
            rounds=rounds,
            steps=steps,
            progress=console.print,
        ),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
    )


if __name__ == "__main__":
    app()
