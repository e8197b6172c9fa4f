"""Compares `paramserver plan` with what jobs take: memory of a rank, bytes of the store's tiers, seconds of a step.

Each of eight jobs (cases.py) is planned, run by `paramserver launch` on the CPU, and planned again, so that the rates
of the plan are those of before and after the run. The speed of a virtual machine changes from minute to minute, so this
is repeated: with two rounds a job is planned three times and run twice. The result is one JSON object:

- `machine`, `provenance`
- `load`: the machine's load average over a minute, at the beginning and at the end; what is above the benchmark's own 1
  to 2 is that of other processes
- `jobs`: by name, for each of `rank_bytes` (peak of a rank's private memory, without that of the bare process),
  `host_bytes` and `nvme_bytes` (used bytes of the store's tiers after the last step) and `step_seconds` (median without
  the first eight steps): `planned`, `measured` and `ratio`.
  Seconds are the medians of the rounds; `rounds` has those of each round, the bytes are those of the first one
- `worst`: the ratio that is farthest from 1, by figure

Run as a module from the root of the repository: `python -m benchmarks.planning.plan`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.common import machine, report
from benchmarks.common.measure import BenchmarkError, Progress
from benchmarks.planning.cases import JOBS, Job

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench-plan"
RANK_SECONDS = 900.0
# In the first steps the daemon fills the arena and the kernel hands out pages, so they take longer than later ones.
WARM_UP_STEPS = 8
FIGURES = ("rank_bytes", "host_bytes", "nvme_bytes", "step_seconds")
# The rates of a plan whose seconds are not looked at.
UNMEASURED = "--no-probe --flops 1e12 --nvme-read 1GB --nvme-write 1GB --collective 1GB"
MIB = 1 << 20
# The numbers of the tiers in the contract (enum Tier).
HOST, NVME = "2", "3"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def measure(jobs: Sequence[Job], directory: Path, progress: Progress, *, rounds: int) -> dict[str, Any]:
    """Plan and run all jobs, one after the other, and return the result. It can raise BenchmarkError.

    Args:
        rounds: how often each job is run to compare the seconds of a step; 0: it is run once, for the bytes alone.
    """
    began = os.getloadavg()[0]
    found = {}
    for job in jobs:
        progress(job.name)
        found[job.name] = compare(job, directory, rounds=rounds)
    return {
        "load": [round(began, 2), round(os.getloadavg()[0], 2)],
        "jobs": found,
        "worst": {
            figure: max((one[figure]["ratio"] for one in found.values()), key=lambda ratio: abs(math.log(ratio)))
            for figure in FIGURES[: None if rounds else -1]
        },
    }


def compare(job: Job, directory: Path, *, rounds: int) -> dict[str, Any]:
    """Return the figures of one job, planned and measured."""
    place = directory / "job"
    plans = [_plan(job, _prepare(job, place), with_probe=rounds > 0)]
    runs = []
    for _ in range(max(1, rounds)):
        runs.append(_train(job, _prepare(job, place)))
        if rounds:
            plans.append(_plan(job, place, with_probe=True))
    shutil.rmtree(place, ignore_errors=True)
    first, ranks = plans[0], runs[0]
    accounts = ranks[0]["accounts"]
    planned = {
        "rank_bytes": first["rank"]["bytes"],
        "host_bytes": first["store"]["home_bytes"] + first["store"]["buffer_bytes"] + first["store"]["header_bytes"],
        "nvme_bytes": first["store"]["written_bytes"],
        "step_seconds": statistics.median(plan["step"]["seconds"] for plan in plans),
    }
    seconds = [max(statistics.median(rank["seconds"][WARM_UP_STEPS:]) for rank in run) for run in runs]
    measured = {
        "rank_bytes": max(rank["peak_bytes"] for rank in ranks),
        "host_bytes": accounts[HOST]["fixed"] + (first["store"]["home_bytes"] and accounts[HOST]["jobs"]),
        "nvme_bytes": accounts[NVME]["jobs"],
        "step_seconds": statistics.median(seconds),
    }
    figures = {
        name: {
            "planned": planned[name],
            "measured": measured[name],
            "ratio": round(_ratio(planned[name], measured[name]), 4),
        }
        for name in FIGURES[: None if rounds else -1]
    }
    return figures | {
        "rounds": {"planned": [plan["step"]["seconds"] for plan in plans], "measured": seconds},
        "resources": [plan["step"]["resources"] for plan in plans],
        "seconds": [[rank["seconds"] for rank in run] for run in runs],
        "report": ranks[0]["report"],
        "lines": first["rank"]["lines"],
    }


def _prepare(job: Job, place: Path) -> Path:
    """Empty the job's directory, write its files, and return it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(job.model()))
    (place / "training.json").write_text(json.dumps(job.config(place / "state")))
    (place / "spec.json").write_text(json.dumps(job.spec(place)))
    return place


def _train(job: Job, place: Path) -> list[dict[str, Any]]:
    """Run the job, and return what its ranks have written. It can raise BenchmarkError."""
    run = [*("--nproc-per-node", str(job.ranks)), str(Path(__file__).with_name("measured_rank.py"))]
    _run(["launch", *run, str(place / "spec.json")])
    return [json.loads((place / f"result.{rank}").read_text()) for rank in range(job.ranks)]


def _ratio(planned: float, measured: float) -> float:
    return 1.0 if planned == measured else planned / measured if measured else math.inf


def _plan(job: Job, place: Path, *, with_probe: bool) -> dict[str, Any]:
    options = ["--config", str(place / "training.json"), "--nproc-per-node", str(job.ranks), "--device", "cpu"]
    options += ["--tokens", str(job.tokens), "--dir", str(place / "probe"), "--no-search", "--json"]
    options += [] if with_probe else UNMEASURED.split()
    found: dict[str, Any] = json.loads(_run(["plan", str(place / "config.json"), *options]))
    return found


def _run(arguments: list[str]) -> str:
    """Run a verb of `paramserver` and return its output. It can raise BenchmarkError."""
    removed = ("PARAMSERVER_ADDRESS", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    ended = subprocess.run(
        [sys.executable, "-m", "paramserver", *arguments],
        cwd=machine.ROOT,
        env=environment | {"PYTHONPATH": str(machine.ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=RANK_SECONDS,
        check=False,
    )
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        raise BenchmarkError(f"paramserver {arguments[0]} ended with {ended.returncode}: {' | '.join(lines[-8:])}")
    return ended.stdout


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    rows = []
    for name, job in result["jobs"].items():
        cells = [name]
        for figure in filter(job.__contains__, FIGURES):
            one = job[figure]
            unit = 1.0 if figure == "step_seconds" else MIB
            digits = 3 if figure == "step_seconds" else 1
            cells += [
                f"{one['planned'] / unit:.{digits}f}",
                f"{one['measured'] / unit:.{digits}f}",
                f"{one['ratio']:.3f}",
            ]
        rows.append(cells)
    header = ["job"]
    for title in ("rank, MiB", "host tier, MiB", "NVMe, MiB", "step, s")[: len(result["worst"])]:
        header += [f"{title}: planned", "measured", "ratio"]
    load = result["load"]
    return "\n\n".join(
        (
            "Planned beside measured. `rank`: peak of a rank's private memory, without that of the bare process. `host "
            "tier`: what is placed there, buffers and header. `NVMe`: the committed versions. `step`: the medians of "
            "plans and runs, which follow each other in turns. The load average was "
            f"{load[0]} at the beginning and {load[1]} at the end.",
            report.table(header, rows),
        )
    )


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = DEFAULT_DIRECTORY,
    jobs: Annotated[str, typer.Option(help="Numbers of the jobs, from 0, with commas; empty: all.")] = "",
    rounds: Annotated[
        int, typer.Option(min=0, help="Runs of each job whose seconds are compared; 0: compare bytes alone.")
    ] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    chosen = [JOBS[int(number)] for number in jobs.split(",")] if jobs else list(JOBS)
    report.run(
        "plan",
        "The plan of a job",
        "bench-plan",
        lambda: measure(chosen, directory, Console(stderr=True).print, rounds=rounds),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        errors=(subprocess.TimeoutExpired,),
    )


if __name__ == "__main__":
    app()
