"""Measures putting, committing, listing and getting many small tensors, and how long the daemon's event loop blocks.

The result is one JSON object:

- `machine`, `provenance`, `parameters` (`elements` of each tensor)
- `cases`: by way (`arena`: the client maps the daemon's memory; `streams`: the client does not) and number of tensors:
  - `phases`: for each phase `seconds`, `per_second` (tensors), and `longest_answer_seconds` (the slowest answer to a
    health check that another process calls every 10 ms). The phases are `open` a new job, `put` all tensors in one
    call, `commit`, `update` (put and commit one tensor), `list` all tensors, `read` (open a reader), `get` all tensors
    in one call, `shards` (ListShards, all pages), `reopen` the job after a restart of the daemon, `delete`
  - `loop_stalls`, `longest_loop_stall_seconds`: stalls that the daemon's own watch saw; 0 if none was above 0.1 s
  - `restart_seconds`: the time until a daemon that was stopped with these tensors serves again
  - `private_bytes_per_tensor`: the daemon's private memory for each tensor, after the commit and after the restart

Run as a module from the root of the repository: `python -m benchmarks.dataplane.small_tensors`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.common import report
from benchmarks.common.measure import BenchmarkError, Progress
from benchmarks.common.store_daemon import StoreDaemon, started
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from trainer_client import StoreClientSync
from trainer_client.errors import TrainerClientError
from trainer_client.transport.channel import open_channel
from trainer_client.transport.credentials import Credentials

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
ELEMENTS = 3
SIZES = (20_000, 200_000)
QUICK = (200,)
WAYS = ("arena", "streams")
CONFIG = {"host_budget": "512MiB", "nvme_budget": "8GiB"}
DEADLINE_SECONDS = 600.0
PHASES = ("open", "put", "commit", "update", "list", "read", "get", "shards", "reopen", "delete")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass(slots=True)
class Phases:
    """When each phase of a case began and ended."""

    progress: Callable[[str], None]
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record when the block begins and ends."""
        self.progress(name)
        began = time.monotonic()
        yield
        self.spans[name] = began, time.monotonic()

    def results(self, tensors: int, answers: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
        """Return the result of each phase; `answers` are (time, seconds) of all health checks."""
        return {
            name: {
                "seconds": round(ended - began, 4),
                "per_second": round(tensors / (ended - began)),
                "longest_answer_seconds": round(
                    max((took for asked, took in answers if asked <= ended and asked + took >= began), default=0.0), 4
                ),
            }
            for name, (began, ended) in self.spans.items()
        }


def tensors_of(count: int) -> dict[str, torch.Tensor]:
    """Return `count` small tensors [ELEMENTS] in fp32, with names like those of a model."""
    return {f"layer.{i // 8}.weight.{i % 8}": torch.full((ELEMENTS,), float(i)) for i in range(count)}


def run_case(way: str, count: int, directory: Path, progress: Progress) -> dict[str, Any]:
    """Run all phases with `count` tensors, and return the case's result; see the module."""
    tensors = tensors_of(count)
    phases = Phases(lambda name: progress(f"{way}, {count} tensors: {name}"))
    answers: list[tuple[float, float]] = []
    with _daemon(directory, answers) as daemon:
        idle_bytes = daemon.private_bytes
        with StoreClientSync.connect(daemon.socket_address, prefer_streams=way == "streams") as store:
            _fill(store, tensors, phases)
            committed_bytes = daemon.private_bytes
            _read(store, tensors, phases)
        with phases.phase("shards"):
            _list_shards(daemon)
        seen = [_watched(daemon)]
    began = time.monotonic()
    with _daemon(directory, answers) as daemon:
        restart_seconds = time.monotonic() - began
        restarted_bytes = daemon.private_bytes
        with StoreClientSync.connect(daemon.socket_address) as store, phases.phase("reopen"):
            store.open("small", tensors, timeout=DEADLINE_SECONDS).close()
        with phases.phase("delete"):
            _delete(daemon)
        seen.append(_watched(daemon))
    return {
        "phases": phases.results(count, answers),
        "loop_stalls": sum(tiers.loop_stalls for tiers in seen),
        "longest_loop_stall_seconds": max(tiers.longest_loop_stall_seconds for tiers in seen),
        "restart_seconds": round(restart_seconds, 2),
        "private_bytes_per_tensor": {
            "committed": round((committed_bytes - idle_bytes) / count),
            "restarted": round((restarted_bytes - idle_bytes) / count),
        },
    }


def _fill(store: StoreClientSync, tensors: dict[str, torch.Tensor], phases: Phases) -> None:
    with phases.phase("open"):
        job = store.open("small", tensors, timeout=DEADLINE_SECONDS)
    with job:
        with phases.phase("put"):
            job.put(tensors)
        with phases.phase("commit"):
            job.commit()
        with phases.phase("update"):
            name = next(iter(tensors))
            tensors[name] = tensors[name] + 1
            job.put({name: tensors[name]})
            job.commit()


def _read(store: StoreClientSync, tensors: dict[str, torch.Tensor], phases: Phases) -> None:
    with phases.phase("list"):
        listed = store.list_tensors("small", timeout=DEADLINE_SECONDS)
    if [tensor.fqn for tensor in listed] != sorted(tensors):
        raise BenchmarkError("the store lists other tensors than were put")
    with phases.phase("read"):
        reader = store.read("small")
    with reader, phases.phase("get"):
        found = reader.get_many(tensors, timeout=DEADLINE_SECONDS)
    if any(not torch.equal(found[name], value) for name, value in tensors.items()):
        raise BenchmarkError("the store gives other values than were put")


def _list_shards(daemon: StoreDaemon) -> None:
    with open_channel(daemon.socket_address, Credentials()) as channel:
        admin: Any = admin_grpc.StoreAdminStub(channel)
        request = admin_pb.ListShardsRequest(job="small")
        while (page := admin.ListShards(request)).next_page_token:
            request.page_token = page.next_page_token


def _delete(daemon: StoreDaemon) -> None:
    with open_channel(daemon.socket_address, Credentials()) as channel:
        admin: Any = admin_grpc.StoreAdminStub(channel)
        admin.DeleteJob(admin_pb.DeleteJobRequest(job="small"))


def _watched(daemon: StoreDaemon) -> admin_pb.GetTiersResponse:
    with open_channel(daemon.socket_address, Credentials()) as channel:
        admin: Any = admin_grpc.StoreAdminStub(channel)
        tiers: admin_pb.GetTiersResponse = admin.GetTiers(admin_pb.GetTiersRequest())
        return tiers


@contextmanager
def _daemon(directory: Path, answers: list[tuple[float, float]]) -> Iterator[StoreDaemon]:
    """Yield a daemon with its files in `directory`; a probe runs beside it, and its samples are added to `answers`."""
    with started(directory, CONFIG) as daemon:
        command = [sys.executable, "-m", "benchmarks.dataplane.loop_probe", daemon.socket_address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
            assert probe.stdout is not None
            if not probe.stdout.readline():
                raise BenchmarkError("the probe of the daemon's event loop did not begin")
            try:
                yield daemon
            finally:
                out, _ = probe.communicate()
                answers += [(asked, took) for asked, took in json.loads(out or "[]")]


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown, with a table for each number of tensors."""
    parts = [
        f"Tensors of {ELEMENTS} float32 elements. `answer`: the slowest answer to a health check that another process "
        "calls every 10 ms; it includes all delays by the daemon's event loop and by the machine."
    ]
    header = ("phase", *(f"{way}, {what}" for way in WAYS for what in ("s", "tensors/s", "answer ms")))
    for count in result["parameters"]["tensors"]:
        cases = [result["cases"][way][str(count)] for way in WAYS]
        rows: list[list[object]] = [
            [
                name,
                *(
                    cell
                    for case in cases
                    for phase in (case["phases"][name],)
                    for cell in (
                        f"{phase['seconds']:.3f}",
                        f"{phase['per_second']:,}" if name not in ("update", "read") else "-",
                        f"{phase['longest_answer_seconds'] * 1e3:.0f}",
                    )
                ),
            ]
            for name in PHASES
        ]
        stalls = max(case["longest_loop_stall_seconds"] for case in cases)
        memory = cases[0]["private_bytes_per_tensor"]
        parts += [
            f"**{count:,} tensors.** The daemon's own watch saw "
            + (f"its event loop blocked for {stalls:.2f} s. " if stalls else "no stall of 0.1 s. ")
            + f"Its memory: {memory['committed']} bytes for each tensor after the commit, {memory['restarted']} "
            f"after a restart, which took {cases[0]['restart_seconds']:.1f} s.",
            report.table(header, rows),
        ]
    return "\n\n".join(parts)


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go; they are removed.")] = DEFAULT_DIRECTORY,
    quick: Annotated[bool, typer.Option("--quick", help="A few tensors: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    sizes = QUICK if quick else SIZES
    console = Console(stderr=True)

    def run_cases() -> dict[str, Any]:
        cases: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
        with console.status("starting") as status:
            for count in sizes:
                for way in WAYS:
                    with tempfile.TemporaryDirectory(dir=directory) as scratch:
                        cases[way][str(count)] = run_case(way, count, Path(scratch), status.update)
        return {"parameters": {"elements": ELEMENTS, "tensors": sizes}, "cases": cases}

    report.run(
        "small_tensors",
        "Small tensors",
        "bench-small",
        run_cases,
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        errors=(TrainerClientError,),
    )


if __name__ == "__main__":
    app()
