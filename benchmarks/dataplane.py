"""Measures the data plane, against the least that could do the same in the same run, taking turns.

The result is one JSON object: `machine`, `provenance`, `parameters`, and by part what its module says:

- `remote`: between nodes (`benchmarks.dataplane_remote`)

Run as a module from the root of the repository: `python -m benchmarks.dataplane`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import dataplane_remote, machine, report
from benchmarks.measure import BenchmarkError
from trainer_client.errors import TrainerClientError

MIB = 1 << 20
FULL: dict[str, Any] = {"size_bytes": 256 * MIB, "idle_streams": 1000}
QUICK: dict[str, Any] = {"size_bytes": 4 * MIB, "idle_streams": 20}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def markdown(result: dict[str, Any]) -> str:
    """The result as tables."""
    remote = result["remote"]
    rows = [
        [
            name,
            f"{remote[name]['tcp']['median_gb_per_second']:.2f}",
            f"{remote[name]['ours']['median_gb_per_second']:.2f}",
            f"{remote[name]['ratio']:.2f}",
        ]
        for name in ("read", "write")
    ]
    crowd = remote["crowd"]
    memory = {name: f"{max(samples) / MIB:.0f} MiB" for name, samples in crowd["private_bytes"].items()}
    parameters = result["parameters"]
    return "\n\n".join(
        (
            f"Between two processes over the loopback, {parameters['size_bytes'] // MIB} MiB into preallocated memory; "
            f"`ratio` is the median of ours / TCP over {parameters['pairs']} pairs.",
            report.table(("remote", "bare TCP GB/s", "ours GB/s", "ratio"), rows),
            f"Beside {crowd['idle_streams']} idle streams and a slow reader, a fast reader keeps {crowd['ratio']:.2f} "
            f"of {crowd['alone']['median_gb_per_second']:.2f} GB/s. The daemon's private memory: {memory['alone']} "
            f"alone, {memory['with_crowd']} with them, {memory['after_reads']} after reads beside them; "
            f"{crowd['bytes_per_idle_stream'] / 1024:.0f} KiB for each stream.",
        )
    )


@app.command(help=__doc__)
def main(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of each case, after a warm-up; best an even number.")] = 10,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, one pair: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not tables.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    console = Console(stderr=True)
    sizes, pairs = (QUICK, 1) if quick else (FULL, pairs)
    try:
        with console.status("starting") as status:
            result: dict[str, Any] = {
                "machine": machine.describe(Path.cwd()),
                "provenance": machine.provenance(),
                "parameters": {"pairs": pairs, **sizes},
                "remote": dataplane_remote.run(pairs, progress=status.update, **sizes),
            }
    except (BenchmarkError, TrainerClientError, OSError) as error:
        typer.echo(f"bench-dataplane: {error}", err=True)
        raise typer.Exit(1) from None
    if results:
        report.store("dataplane", "Data plane", result, markdown(result), "make bench-dataplane")
    typer.echo(json.dumps(result, indent=1) if as_json else markdown(result))


if __name__ == "__main__":
    app()
