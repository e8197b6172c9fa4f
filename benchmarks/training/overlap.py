"""Shows how much of a step's copies between host and device runs beside its computation, in virtual time.

There is no accelerator in it: `python -m tests.device.overlap` trains on the simulated device of tests/device, whose
links and kernels have set speeds, and counts. The result is one JSON object:

- `machine`, `provenance`
- `layers`, `steps`: the size of the run
- `runs`: by tier and ratio (the time of the kernels by the time of the copies in one direction), for `lanes` and for
  `one_stream`, the control without overlap: `hidden` (the part of the copies' time that lies under kernels, by
  direction and for both), `seconds` of the run in virtual time, and `of_bound`: those by the seconds of what takes
  longest

Run as a module from the root of the repository: `python -m benchmarks.training.overlap`. It needs a C++ compiler.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import typer

from benchmarks.common import report
from benchmarks.common.machine import ROOT
from benchmarks.common.measure import BenchmarkError

# The ratio of a quick run: the computation takes longer.
QUICK = ("--ratio", "2")

app = typer.Typer(add_completion=False)


def measure(*arguments: str) -> dict[str, Any]:
    """Run the program on the simulated device, and return its figures. It can raise BenchmarkError."""
    command = [sys.executable, "-m", "tests.device.overlap", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"the run has ended with {done.returncode}; its messages are above")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _share(figures: dict[str, Any], direction: str) -> str:
    """Return the hidden part of the copies in a direction, for people; "-" if there are none."""
    return f"{figures['hidden'][direction]:.1%}" if figures["copy_seconds"][direction] else "-"


def markdown(result: dict[str, Any]) -> str:
    """Return the section of RESULTS.md."""
    rows = []
    for run in result["runs"].values():
        lanes, control = run["lanes"], run["one_stream"]
        shares = [_share(lanes, "in"), _share(lanes, "out"), f"{lanes['hidden']['both']:.1%}"]
        rows.append(
            [
                f"{run['tier']}, {run['ratio']:g}",
                *shares,
                f"{control['hidden']['both']:.1%}",
                f"{lanes['of_bound']:.2f}",
                f"{control['of_bound']:.2f}",
            ]
        )
    header = ("tier, compute / copies", "in", "out", "all copies", "control", "time / bound", "control")
    return "\n\n".join(
        [
            f"GPT-2 with {result['layers']} blocks on the simulated device, {result['steps']} steps, all states in the "
            "store (nvme, host) or on the device, from where commits copy them. Times are virtual: they follow from "
            "the order of calls, streams and events, and from the set speeds of links and kernels, and they are the "
            "same on each machine. The ratio is the time of all kernels by the time of all copies in one direction. "
            "The shares are the parts of the copies' time that lie under kernels; the control has all lanes on one "
            "stream. The bound is the time of the longest of kernels, copies in and copies out. A forward pass has a "
            "third of the kernels' time and half of the copies in, a backward pass the rest and all copies out, so "
            "the kernels of both passes take longer than their copies from a ratio of 1.5 on. States on the device "
            "are copied out under the whole next step.",
            report.table(header, rows),
        ]
    )


@app.command(help=__doc__)
def main(
    quick: Annotated[bool, typer.Option("--quick", help="One ratio only: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    report.run(
        "overlap",
        "Copies beside computation, on a simulated device",
        "bench-overlap",
        lambda: measure(*(QUICK if quick else ())),
        markdown,
        directory=ROOT,
        as_json=as_json,
        results=results,
    )


if __name__ == "__main__":
    app()
