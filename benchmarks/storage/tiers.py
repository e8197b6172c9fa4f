"""Measures the NVMe tier and the engine; where fio can do the same, both take turns in one run.

The result is one JSON object:

- `machine`, `provenance`, `fio_version` (null: fio is not installed), `parameters`
- `cases`: by name, `fio` and `ours` (bytes, seconds, gb_per_second of each pair; median_gb_per_second,
  cpu_seconds_per_gb), `ratios` of the pairs and their median `ratio`: ours / fio. Without fio: `fio` and `ratio` null
- `checksums`: the speed of recording and verifying alone, and `share_of_read_cpu`
- `commits`: by number of slabs, seconds of the updates, the commit, and the catalog's transaction alone

Run as a module from the root of the repository: `python -m benchmarks.storage.tiers`.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from benchmarks.common import machine, report
from benchmarks.common.measure import Progress, Threads
from benchmarks.storage import checksum_cases, engine_cases, fio, tier_cases
from benchmarks.storage.engine_cases import EngineSizes
from benchmarks.storage.jobs import BenchmarkLayout
from benchmarks.storage.tier_cases import MIB, TierSizes
from storage.base.errors import StorageError
from storage.base.tune_interpreter import tune_interpreter
from storage.tiers.nvme import REQUEST_BYTES

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
MIN_COMMIT_STEPS = 5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of all measurements, and the disk space that they need."""

    tier: TierSizes
    engine: EngineSizes
    disk_bytes: int


FULL = Sizes(
    tier=TierSizes(sequential_bytes=1024 * MIB, model_width=1024, model_blocks=12, tensors=10_000),
    engine=EngineSizes(
        slabs=(100, 1_000, 10_000),
        streamed=BenchmarkLayout(groups=12, numel=12 * 1024**2 + 13 * 1024),
        host_budget_bytes=512 * MIB,
    ),
    disk_bytes=6 << 30,
)
QUICK = Sizes(
    tier=TierSizes(sequential_bytes=32 * MIB, model_width=128, model_blocks=2, tensors=100),
    engine=EngineSizes(slabs=(20,), streamed=BenchmarkLayout(groups=2, numel=1 << 18), host_budget_bytes=32 * MIB),
    disk_bytes=1 << 30,
)


async def measure(
    sizes: Sizes, threads: Threads, directory: Path, rounds: int, steps: int, progress: Progress
) -> dict[str, Any]:
    """Run all measurements with files below `directory`, and return the result; see the module."""
    found = fio.find(directory, direct=True)
    result: dict[str, Any] = {
        "fio_version": found.version if found else None,
        "parameters": {"rounds": rounds, "commit_steps": steps, "threads": asdict(threads), **asdict(sizes)},
    }
    cases = await tier_cases.run(sizes.tier, threads, directory, rounds, progress)
    progress("checksums")
    result["checksums"] = [
        checksum_cases.run(rounds, cases[f"read_{name}"]["ours"]["cpu_seconds_per_gb"], piece_bytes)
        for name, piece_bytes in (("1mib", MIB), ("4mib", REQUEST_BYTES))
    ]
    cases["update_streaming"] = await engine_cases.update_streaming(sizes.engine, threads, directory, rounds, progress)
    result["commits"] = [
        await engine_cases.commit_latency(slabs, threads, directory, steps, progress) for slabs in sizes.engine.slabs
    ]
    return result | {"cases": cases}


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown tables."""
    cases = [
        [
            name,
            case["fio"] and f"{case['fio']['median_gb_per_second']:.2f}",
            f"{case['ours']['median_gb_per_second']:.2f}",
            case["ratio"] and f"{case['ratio']:.2f}",
            case["fio"] and f"{case['fio']['cpu_seconds_per_gb']:.3f}",
            f"{case['ours']['cpu_seconds_per_gb']:.3f}",
        ]
        for name, case in result["cases"].items()
    ]
    checksums = [
        [
            f"{entry['piece_bytes'] // MIB} MiB",
            *(f"{entry[side]['median_gb_per_second']:.1f}" for side in ("record", "verify")),
            f"{entry['verify']['cpu_seconds_per_gb']:.3f}",
            f"{entry['share_of_read_cpu']:.0%}",
        ]
        for entry in result["checksums"]
    ]
    commits = [
        [entry["slabs"], *(f"{entry[f'{part}_seconds']['median']:.4f}" for part in ("update", "commit", "catalog"))]
        for entry in result["commits"]
    ]
    threads = result["parameters"]["threads"]
    return "\n\n".join(
        (
            f"Both sides read with {threads['read']} threads and write with {threads['write']}. `ratio` is the median "
            f"of ours / fio over {result['parameters']['rounds']} pairs.",
            report.table(("case", "fio GB/s", "ours GB/s", "ratio", "fio CPU s/GB", "ours CPU s/GB"), cases),
            report.table(
                ("checksums, in pieces of", "record GB/s", "verify GB/s", "CPU s/GB", "of a read's CPU"), checksums
            ),
            report.table(("slabs per step", "updates, s", "commit, s", "catalog alone, s"), commits),
        )
    )


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go; they are removed.")] = DEFAULT_DIRECTORY,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of each case, after a warm-up; best an even number.")] = 6,
    read_threads: Annotated[int, typer.Option(min=1)] = Threads().read,
    write_threads: Annotated[int, typer.Option(min=1)] = Threads().write,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, one pair: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not tables.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    sizes, rounds, steps = (QUICK, 1, 1) if quick else (FULL, rounds, max(rounds, MIN_COMMIT_STEPS))
    # The daemon does the same at its start.
    tune_interpreter()

    def run_cases() -> dict[str, Any]:
        machine.check_free_bytes(directory, sizes.disk_bytes, "the benchmark")
        if fio.find(directory, direct=True) is None:
            console.print(f"fio is missing, so there is nothing to compare with: {fio.HOW_TO_INSTALL}", style="yellow")
        with console.status("starting") as status, tempfile.TemporaryDirectory(dir=directory) as scratch:
            threads = Threads(read=read_threads, write=write_threads)
            return uvloop.run(measure(sizes, threads, Path(scratch), rounds, steps, status.update))

    report.run(
        "storage",
        "NVMe tier and engine",
        "bench-storage",
        run_cases,
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        errors=(StorageError,),
    )


if __name__ == "__main__":
    app()
