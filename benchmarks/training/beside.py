"""Compares the time and the memory of a training step with those of an earlier commit, taking turns.

The earlier commit is checked out beside this one, and both run `benchmarks.training.step` of their own with this
environment, in turns. A turn is one round of all heats. The result is one JSON object:

- `machine`, `provenance`, `commit` (the earlier one), `rounds`, and `options`, with which both ran
- `contestants`: for each one that both commits have, `seconds` and `earlier_seconds` of a step, for each turn; and this
  commit by the earlier one: `ratio` of the seconds, `beside_plain` of the seconds divided by those of plain PyTorch in
  the same turn, and `memory_ratio`. Each of the three is the median of the pairs, and the two ends of its 95 % interval
  (`median_interval` of benchmarks/common/measure.py), which fewer than six pairs do not have

The commits run the same code for plain PyTorch, so its `ratio` says how much the machine changed between their turns.
The benchmark fails if the losses of the commits differ in a bit.

Run as a module from the root of the repository: `python -m benchmarks.training.beside COMMIT`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import report
from benchmarks.common.checkout import checked_out
from benchmarks.common.machine import ROOT
from benchmarks.common.measure import BenchmarkError, median_interval
from benchmarks.training.step import BUILD, HeatName
from benchmarks.training.task import HEAD_WIDTH

RATIOS = ("ratio", "beside_plain", "memory_ratio")
HEATS = (HeatName.NVME, HeatName.HOST, HeatName.DEVICE)
_OF_STEP = "As of benchmarks.training.step"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def turn(tree: Path, directory: Path, heats: Sequence[HeatName], options: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run one turn with the code in `tree`, and return the figures of each contestant, by its heat and name.

    Raises:
        BenchmarkError: the benchmark ended with an error, which it has printed.
    """
    module = ("-m", "benchmarks.training.step", "--json", "--rounds", "1", "--dir", str(directory))
    chosen = [word for heat in heats for word in ("--heat", heat.value)]
    # The package is installed from this commit's files. The path of the other ones is searched first.
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *module, *chosen, *options], cwd=tree, env=environment, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"benchmarks.training.step ended with {done.returncode} in {tree}")
    found = json.loads(done.stdout)["heats"]
    return {f"{heat}: {name}": figures for heat, part in found.items() for name, figures in part.items()}


def measure(
    commit: str, rounds: int, heats: Sequence[HeatName], directory: Path, options: Sequence[str]
) -> dict[str, Any]:
    """Return the result; see the module. It can raise BenchmarkError."""
    turns = []
    with checked_out(commit) as earlier:
        for number in range(rounds):
            typer.echo(f"round {number + 1} of {rounds}", err=True)
            turns.append([turn(tree, directory, heats, options) for tree in (earlier, ROOT)])
    names = [name for name in turns[0][1] if name in turns[0][0]]
    compared = {name: _compared(name, turns) for name in names}
    return {"commit": commit, "rounds": rounds, "options": list(options), "contestants": compared}


def _compared(name: str, turns: Sequence[Sequence[dict[str, dict[str, Any]]]]) -> dict[str, Any]:
    """Return the figures of one contestant. It can raise BenchmarkError."""
    pairs = [(earlier[name], present[name]) for earlier, present in turns]
    if any(present["losses"] != earlier["losses"] for earlier, present in pairs):
        raise BenchmarkError(f"{name}: the losses of the two commits differ")
    return {
        "seconds": [present["median"] for _, present in pairs],
        "earlier_seconds": [earlier["median"] for earlier, _ in pairs],
        "ratio": _median([present["median"] / earlier["median"] for earlier, present in pairs]),
        "beside_plain": _median([present["ratio"] / earlier["ratio"] for earlier, present in pairs]),
        "memory_ratio": _median([p["memory"]["total"] / e["memory"]["total"] for e, p in pairs]),
    }


def _median(values: Sequence[float]) -> list[float]:
    """Return the median, and the two ends of its interval if there are enough values for one."""
    return [round(value, 3) for value in (statistics.median(values), *(median_interval(values) or ()))]


def _in_words(median: float, *interval: float) -> str:
    ends = " ({:.3f} to {:.3f})".format(*interval) if interval else ""
    return f"{median:.3f}{ends}"


def markdown(result: dict[str, Any]) -> str:
    """Return the section of RESULTS.md."""
    rows = [
        [
            name,
            f"{statistics.median(figures['earlier_seconds']):.3f}",
            f"{statistics.median(figures['seconds']):.3f}",
            *(_in_words(*figures[key]) for key in RATIOS),
        ]
        for name, figures in result["contestants"].items()
    ]
    introduction = (
        f"`bench-step` of commit {result['commit']} and of this one in turns, {result['rounds']} of each; the losses "
        "are the same, bit for bit. Ratios are this commit by the earlier one: of seconds, of seconds divided by those "
        "of `plain` in the same turn, and of memory; the median of the pairs, with its 95 % interval. `plain` is the "
        "same code in both commits, so its ratio shows what the machine adds."
    )
    header = ("contestant", "s, earlier", "s, now", "ratio", "beside plain", "memory")
    return f"{introduction}\n\n{report.table(header, rows)}"


@app.command(help=__doc__)
def main(
    commit: Annotated[str, typer.Argument(help="The earlier commit.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = BUILD / "bench",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each commit; fewer than 6 give no interval.")] = 12,
    heats: Annotated[list[HeatName] | None, typer.Option("--heat", help="Only this one; may be repeated.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help=f"{_OF_STEP}.")] = None,
    hidden: Annotated[int | None, typer.Option(min=HEAD_WIDTH, help=f"{_OF_STEP}; a multiple of {HEAD_WIDTH}.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=f"{_OF_STEP}: sequences of a step.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help=f"{_OF_STEP}: length of a sequence.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help=f"{_OF_STEP}: steps of a round.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    size = {"--layers": layers, "--hidden": hidden, "--batch": batch, "--tokens": tokens, "--steps": steps}
    passed_on = [word for name, value in size.items() if value is not None for word in (name, str(value))]
    options = " ".join([*(f"--heat {heat}" for heat in heats or ()), f"--rounds {rounds}", *passed_on])
    passed_on += ["--quick"] if quick else []
    report.run(
        "beside",
        "A step beside that of an earlier commit",
        "bench-beside",
        lambda: measure(commit, rounds, heats or HEATS, directory.resolve(), passed_on),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        arguments=f"COMMIT={commit} OPTIONS='{options}'",
    )


if __name__ == "__main__":
    app()
