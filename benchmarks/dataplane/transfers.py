"""Measures the data plane beside the simplest program that does the same; both take turns in one run.

The result is one JSON object: `machine`, `provenance`, `parameters`, and two parts that their modules describe:

- `local`: on one node (`benchmarks.dataplane.local`)
- `remote`: between nodes (`benchmarks.dataplane.remote`)

Run as a module from the root of the repository: `python -m benchmarks.dataplane.transfers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.common import report
from benchmarks.dataplane import local, remote
from trainer_client.errors import TrainerClientError

MIB = 1 << 20
FULL: dict[str, dict[str, Any]] = {
    "local": {"shard_mib": (1, 16, 64, 256), "copied_mib": 64, "calls": 200},
    "remote": {"size_bytes": 256 * MIB, "idle_streams": 1000},
}
QUICK: dict[str, dict[str, Any]] = {
    "local": {"shard_mib": (1, 2), "copied_mib": 2, "calls": 5},
    "remote": {"size_bytes": 4 * MIB, "idle_streams": 20},
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown tables."""
    return f"{_local_tables(result)}\n\n{_remote_tables(result)}"


def _local_tables(result: dict[str, Any]) -> str:
    latency, same_node = result["local"]["lease_latency"], result["local"]["same_node"]
    rows = [
        [
            client,
            f"{mib} MiB",
            *(f"{case[name][quantile]:.0f}" for name in ("echo", "lease") for quantile in ("p50", "p99")),
            f"{case['ratio']:.2f}",
        ]
        for client, by_size in latency.items()
        for mib, case in by_size.items()
    ]
    return "\n\n".join(
        (
            f"A lease of a shard that is in host memory, beside an echo of the same messages by a bare grpc.aio "
            f"server, in microseconds; {result['parameters']['local']['calls']} calls of each, taking turns.",
            report.table(("client", "shard", "echo p50", "p99", "lease p50", "p99", "ratio of p50"), rows),
            f"On the same node, leased, copied out of the arena and returned: {same_node['gb_per_second']:.1f} GB/s, "
            f"{same_node['ratio']:.2f} of what memcpy within one process reaches "
            f"({same_node['memcpy_gb_per_second']:.1f} GB/s), in shards of "
            f"{result['parameters']['local']['copied_mib']} MiB.",
        )
    )


def _remote_tables(result: dict[str, Any]) -> str:
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
            f"Between two processes over the loopback, {parameters['remote']['size_bytes'] // MIB} MiB into "
            f"preallocated memory; `ratio` is the median of ours / TCP over {parameters['pairs']} pairs.",
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
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    sizes, pairs = (QUICK, 1) if quick else (FULL, pairs)

    def measure() -> dict[str, Any]:
        with console.status("starting") as status:
            return {
                "parameters": {"pairs": pairs, **sizes},
                "local": local.run(pairs, progress=status.update, **sizes["local"]),
                "remote": remote.run(pairs, progress=status.update, **sizes["remote"]),
            }

    report.run(
        "dataplane",
        "Data plane",
        "bench-dataplane",
        measure,
        markdown,
        directory=Path.cwd(),
        as_json=as_json,
        results=results,
        errors=(TrainerClientError,),
    )


if __name__ == "__main__":
    app()
