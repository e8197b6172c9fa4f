"""Measures how often prefetching has a unit's bytes in host memory before the trainer gathers the unit.

Everything is on NVMe, with a host budget that holds the gradients, the optimizer's tiles and half of the parameters.
The models differ in how well the order of their units can be predicted:

- `gpt2`: all layers, always in the same order
- `mixtral`: a mixture of experts; a unit is a layer with all of its experts, and the order is always the same
- `mixtral_experts`: the same model, in which each expert is a unit; the tokens choose the experts that run
- `opt_layer_drop`: a quarter of the layers, drawn anew for each step, do not run

The result is one JSON object: `machine`, `provenance`, `parameters`, and `models`, by name:

- `predictable`, `parameters` (the number of elements), `host_budget_bytes`
- `gathers`; `hits`: the gathers that found their bytes in host memory; `predicted`: the gathers that the trainer had
  announced to the store; `hit_rate` and `predicted_rate`
- `hidden_fetch_fraction`: the part of the fetch time during which the trainer did not wait (median over steps; null:
  nothing was fetched)
- `stall_fraction` and `seconds` (medians over steps)

Run as a module from the root of the repository: `python -m benchmarks.training.prefetching`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.common import report
from benchmarks.common.measure import Progress, Threads
from benchmarks.training import bf16_emulation
from benchmarks.training.entries import ours
from benchmarks.training.heat import Heat, Standing
from benchmarks.training.models import build
from benchmarks.training.task import HEAD_WIDTH, ModelKind, TrainingTask

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
MIB = 1 << 20
# The 4 bytes are 2 for the gradient in bf16, 1 for the optimizer's tiles, and 1 for half of the parameters in bf16.
HOST_BYTES_PER_PARAMETER = 4
# The smallest host budget. Models that would get less by HOST_BYTES_PER_PARAMETER get this one.
LEAST_HOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model to be measured; `units` is the config key `paramserver.units`."""

    kind: ModelKind
    predictable: bool
    units: Any = "blocks"


MODELS = (
    Model(kind="gpt2", predictable=True),
    Model(kind="mixtral", predictable=True),
    Model(kind="mixtral_experts", predictable=False, units={"classes": ["Expert", "MixtralAttention"]}),
    Model(kind="opt_layer_drop", predictable=False),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def measure(
    task_of: Mapping[ModelKind, TrainingTask],
    directory: Path,
    *,
    rounds: int,
    steps: int,
    progress: Progress,
) -> dict[str, Any]:
    """Measure all models, one after the other, and return the result; see the module. It can raise BenchmarkError."""
    models: dict[str, Any] = {}
    for model in MODELS:
        task = task_of[model.kind]
        size = _parameters(task)
        budget = max(LEAST_HOST_BYTES, size * HOST_BYTES_PER_PARAMETER)
        entry = ours(
            model.kind,
            task,
            size,
            "nvme",
            durability="step",
            host_budget_bytes=budget,
            each_step=True,
            units=model.units,
        )
        heat = Heat(task, directory, threads=Threads(), progress=progress)
        (standing,) = heat.run([entry], rounds=rounds, steps=steps)
        about = {"predictable": model.predictable, "parameters": size, "host_budget_bytes": budget}
        models[model.kind] = about | _figures(standing)
    return {
        "parameters": {kind: asdict(task) for kind, task in task_of.items()}
        | {"rounds": rounds, "steps": steps}
        | {"precision": bf16_emulation.precision_in_words()},
        "models": models,
    }


def _parameters(task: TrainingTask) -> int:
    """Return the number of elements of the task's model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(task).parameters())


def _figures(standing: Standing) -> dict[str, Any]:
    """Return the figures of the steps that count.

    The first step of a block does not count, because its prefetches began in the step before.
    """
    reports = [facts["report"] for block in standing.blocks for facts in block.facts[1:]]
    gathers, hits, predicted = (
        sum(values[name] for values in reports) for name in ("gathers", "prefetch_hits", "predicted_gathers")
    )
    hidden = [values["hidden_fetch_fraction"] for values in reports if values["hidden_fetch_fraction"] is not None]
    return {
        "gathers": gathers,
        "hits": hits,
        "predicted": predicted,
        "hit_rate": round(hits / gathers, 4),
        "predicted_rate": round(predicted / gathers, 4),
        "hidden_fetch_fraction": _median(hidden) if hidden else None,
        "stall_fraction": _median([values["stall_fraction"] for values in reports]),
        "seconds": _median([value for block in standing.blocks for value in block.seconds[1:]]),
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    rows = [
        [
            f"`{name}`",
            "same in each step" if figures["predictable"] else "changes",
            f"{figures['parameters'] / 1e6:.0f} M",
            figures["host_budget_bytes"] // MIB,
            figures["gathers"],
            f"{figures['hit_rate']:.0%}",
            f"{figures['predicted_rate']:.0%}",
            None if figures["hidden_fetch_fraction"] is None else f"{figures['hidden_fetch_fraction']:.0%}",
            f"{figures['stall_fraction']:.0%}",
            f"{figures['seconds']:.2f}",
        ]
        for name, figures in result["models"].items()
    ]
    return "\n\n".join(
        (
            f"Trained in {result['parameters']['precision']}. Everything is on NVMe, with host memory for the "
            "gradients, the optimizer's tiles and half of the parameters. A hit is a gather that finds its bytes in "
            "host memory; a predicted gather is one that the trainer had announced to the store. In `mixtral_experts` "
            "each expert is a unit, chosen by the tokens; `opt_layer_drop` leaves out a quarter of its layers, other "
            "ones in each step.",
            report.table(
                (
                    "model",
                    "order",
                    "parameters",
                    "budget, MiB",
                    "gathers",
                    "hits",
                    "predicted",
                    "fetch time hidden",
                    "stalled",
                    "s/step",
                ),
                rows,
            ),
        )
    )


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = DEFAULT_DIRECTORY,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(min=HEAD_WIDTH, help=f"A multiple of {HEAD_WIDTH}.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Length of a sequence; a step has 4 of them.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the warm-up.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a turn; the first does not count.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, one round: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    if quick:
        layers, hidden, tokens, rounds, steps = 2, HEAD_WIDTH, 16, 1, 2
    task_of = {
        model.kind: TrainingTask(model=model.kind, layers=layers, hidden=hidden, batch=4, tokens=tokens, vocab=512)
        for model in MODELS
    }
    report.run(
        "moe",
        "Prefetching",
        "bench-moe",
        lambda: measure(task_of, directory, rounds=rounds, steps=steps, progress=console.print),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
    )


if __name__ == "__main__":
    app()
