"""Commits a small model very often, and measures what must not grow: files, memory and latency.

The result is one JSON object:

- `machine`, `provenance`, `parameters`
- `samples`: twenty samples at equal distances: `commits` made so far, `data_file_bytes` and
  `data_file_allocated_bytes` (blocks that the file system allocated), `catalog_bytes`, `wal_bytes`, `resident_bytes`
  of the process, `free_runs` (pieces of free space) of the data file, and `median_commit_seconds` and
  `p99_commit_seconds` of the commits since the last sample
- `growth`: of each figure, the last sample / the one in the middle; null if the latter is 0

Run as a module from the root of the repository: `python -m benchmarks.storage.commits`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from benchmarks.common import machine, report
from benchmarks.common.measure import Progress, Stopwatch, Threads
from benchmarks.storage.jobs import Layout, Training, adamw, training
from storage.errors import StorageError
from storage.tiers.extents import unused_runs
from storage.tune_interpreter import tune_interpreter

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
LAYOUT = Layout(groups=12, numel=87_040)
HOST_BUDGET_BYTES = 64 << 20
SAMPLES = 20
FIGURES = (
    "data_file_bytes",
    "data_file_allocated_bytes",
    "catalog_bytes",
    "wal_bytes",
    "resident_bytes",
    "free_runs",
    "median_commit_seconds",
    "p99_commit_seconds",
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


async def measure(commits: int, directory: Path, progress: Progress) -> dict[str, Any]:
    """Make the commits in a state directory below `directory`, and return the result; see the module."""
    window = commits // SAMPLES
    samples: list[dict[str, Any]] = []
    async with training(LAYOUT, directory / "state", Threads(), host_budget_bytes=HOST_BUDGET_BYTES) as run:
        while len(samples) < SAMPLES:
            seconds = []
            for number in range(len(samples) * window, (len(samples) + 1) * window):
                progress(f"commit {number + 1} of {SAMPLES * window}")
                await run.update(await run.gradients(), adamw)
                with Stopwatch() as watch:
                    await run.commit()
                seconds.append(watch.seconds)
            samples.append(_sample(run, (len(samples) + 1) * window, seconds))
    return {
        "parameters": {"commits": SAMPLES * window, "parameters": LAYOUT.groups * LAYOUT.numel, **asdict(LAYOUT)},
        "samples": samples,
        "growth": {figure: _growth(samples, figure) for figure in FIGURES},
    }


def markdown(result: dict[str, Any]) -> str:
    """Return a Markdown table with every fourth sample, and the growth of each figure in the second half of the run."""
    shown = result["samples"][3::4]
    rows: list[list[object]] = [
        [
            sample["commits"],
            *(f"{sample[figure] / 2**20:.2f}" for figure in FIGURES[:5]),
            sample["free_runs"],
            *(f"{sample[figure] * 1e3:.1f}" for figure in FIGURES[6:]),
        ]
        for sample in shown
    ]
    rows.append(["growth in the second half", *(result["growth"][figure] for figure in FIGURES)])
    header = (
        "commits",
        "data file, MiB",
        "allocated, MiB",
        "catalog, MiB",
        "WAL, MiB",
        "resident, MiB",
        "free runs",
        "median commit, ms",
        "p99 commit, ms",
    )
    parameters = result["parameters"]
    about = f"A model of {parameters['parameters']:,} parameters in {parameters['groups']} groups, all of it on NVMe."
    return f"{about}\n\n{report.table(header, rows)}"


def _sample(run: Training, commits: int, seconds: Sequence[float]) -> dict[str, Any]:
    path = run.engine.nvme.files[0].path
    data, catalog = path.stat(), path.with_name("catalog.sqlite")
    used = [
        e
        for slab in run.job.slabs()
        for region in slab.versions.values()
        for e in run.engine.backing.durable.stored(region)[0]
    ]
    # SQLite's journal exists only while the catalog is open, and only in WAL mode.
    journal = catalog.with_name(f"{catalog.name}-wal")
    return {
        "commits": commits,
        "data_file_bytes": data.st_size,
        "data_file_allocated_bytes": data.st_blocks * 512,
        "catalog_bytes": catalog.stat().st_size,
        "wal_bytes": journal.stat().st_size if journal.exists() else 0,
        "resident_bytes": machine.resident_bytes(),
        "free_runs": len(unused_runs(data.st_size, used)),
        "median_commit_seconds": round(statistics.median(seconds), 6),
        "p99_commit_seconds": round(sorted(seconds)[int(0.99 * (len(seconds) - 1))], 6),
    }


def _growth(samples: Sequence[dict[str, Any]], figure: str) -> float | None:
    middle, last = samples[len(samples) // 2 - 1][figure], samples[-1][figure]
    return round(last / middle, 4) if middle else None


@app.command(help=__doc__)
def main(
    commits: Annotated[int, typer.Option("--commits", min=SAMPLES, help="How many; whole twentieths.")] = 10_000,
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go; they are removed.")] = DEFAULT_DIRECTORY,
    quick: Annotated[bool, typer.Option("--quick", help="Forty commits: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    commits = 2 * SAMPLES if quick else commits
    console = Console(stderr=True)
    # The daemon does the same at its start.
    tune_interpreter()

    def make_commits() -> dict[str, Any]:
        with console.status("starting") as status, tempfile.TemporaryDirectory(dir=directory) as scratch:
            return uvloop.run(measure(commits, Path(scratch), status.update))

    report.run(
        "commits",
        "Many commits",
        "bench-commits",
        make_commits,
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        arguments=f"N={commits}",
        errors=(StorageError,),
    )


if __name__ == "__main__":
    app()
