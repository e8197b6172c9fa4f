"""Measures a daemon whose catalog has 10,000 jobs and 1,000,000 shards: its start, its memory and its answers.

The catalog is written by the engine's own code, and the tensors are zeros in a sparse file; see full_catalog.py. One
of the jobs is large, all others are equal. The result is one JSON object:

- `machine`, `provenance`, `parameters` (`jobs`, `shards`, `shards_of_a_job`, `shards_of_the_large_job`,
  `catalog_bytes`)
- `empty`, `full`: the start of a daemon without jobs, and with all of them: `start_seconds` until it serves,
  `start_cpu_seconds` of its process until then, `private_bytes` of its memory, and `peak_bytes` (the largest resident
  set, which includes libraries)
- `answers`: for each call `seconds` (all samples), `median_seconds`, and `longest_answer_seconds` (the slowest answer
  to a health check that another process calls every 10 ms meanwhile). The calls are `jobs` (ListJobs), `shards of a
  job` and `shards of the large job` (ListShards, all pages), `tiers`, `accounts`, `metrics` (a scrape), `page` (the
  figures of the page), `all at once` (each of these, by a client of its own, from the first call to the last answer),
  `commit` (one tensor is put and committed), and `delete` of a small job; `jobs, admin tool` and `shards, admin tool`
  are the commands from their start to their end
- `loop_stalls`, `longest_loop_stall_seconds`: stalls that the daemon's own watch saw; 0 if none was above 0.1 s

Run as a module from the root of the repository: `python -m benchmarks.storage.catalog`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.common import report
from benchmarks.common.measure import BenchmarkError, Progress
from benchmarks.common.store_daemon import StoreDaemon, free_address, started
from benchmarks.storage.full_catalog import LARGE_JOB, SLABS, Size, fill
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from storage.directories import CATALOG
from storage.errors import StorageError
from trainer_client import StoreClientSync
from trainer_client.errors import TrainerClientError
from trainer_client.transport.channel import open_channel
from trainer_client.transport.credentials import Credentials

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
WHOLE = Size(jobs=10_000, tensors=24, large_tensors=10_024)
QUICK = Size(jobs=20, tensors=8, large_tensors=40)
CONFIG = {"host_budget": "64MiB", "nvme_budget": "8GiB"}
DEADLINE_SECONDS = 600.0
SAMPLES = 5
COMMITS = 20

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass(slots=True)
class Answers:
    """The begin and the end of each sample of each call, on the clock of time.monotonic()."""

    progress: Progress
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def take(self, name: str, call: Callable[[], object], samples: int = SAMPLES) -> None:
        """Make a call so many times, and note when each began and ended."""
        for _ in range(samples):
            self.progress(name)
            began = time.monotonic()
            call()
            self.spans.setdefault(name, []).append((began, time.monotonic()))

    def results(self, checks: list[tuple[float, float]]) -> dict[str, dict[str, Any]]:
        """Return the result of each call; `checks` are (time, seconds) of all health checks."""
        found = {}
        for name, spans in self.spans.items():
            seconds = [ended - began for began, ended in spans]
            beside = [
                took
                for asked, took in checks
                if any(asked <= ended and asked + took >= began for began, ended in spans)
            ]
            found[name] = {
                "seconds": [round(one, 5) for one in seconds],
                "median_seconds": round(statistics.median(seconds), 5),
                "longest_answer_seconds": round(max(beside, default=0.0), 4),
            }
        return found


def measure(size: Size, directory: Path, progress: Progress) -> dict[str, Any]:
    """Measure a daemon without jobs, and one with all of them, below `directory`; return the result, see the module."""
    for name in ("empty", "full"):
        (directory / name).mkdir()
    with _started(directory / "empty") as (_, empty):
        pass
    asyncio.run(fill(directory / "full" / "state", size, progress))
    catalog_bytes = (directory / "full" / "state" / CATALOG).stat().st_size
    answers, checks = Answers(progress), list[tuple[float, float]]()
    metrics = free_address()
    progress("starting the daemon with all jobs")
    with _started(directory / "full", metrics_listen=metrics) as (daemon, full), _probing(daemon, checks):
        _ask(daemon, size, metrics, answers)
        with _admin(daemon) as admin:
            watched = admin.GetTiers(admin_pb.GetTiersRequest())
    return {
        "parameters": {
            "jobs": size.jobs,
            "shards": size.shards,
            "shards_of_a_job": size.tensors * len(SLABS),
            "shards_of_the_large_job": size.large_tensors * len(SLABS),
            "catalog_bytes": catalog_bytes,
        },
        "empty": empty,
        "full": full,
        "answers": answers.results(checks),
        "loop_stalls": watched.loop_stalls,
        "longest_loop_stall_seconds": watched.longest_loop_stall_seconds,
    }


@contextmanager
def _started(directory: Path, **config: Any) -> Iterator[tuple[StoreDaemon, dict[str, float]]]:
    """Yield a daemon, and the figures of its start."""
    began = time.monotonic()
    with started(directory, CONFIG | config, start_seconds=DEADLINE_SECONDS) as daemon:
        seconds = time.monotonic() - began
        yield (
            daemon,
            {
                "start_seconds": round(seconds, 2),
                "start_cpu_seconds": round(daemon.cpu_seconds, 2),
                "private_bytes": daemon.private_bytes,
                "peak_bytes": daemon.peak_bytes,
            },
        )


@contextmanager
def _probing(daemon: StoreDaemon, checks: list[tuple[float, float]]) -> Iterator[None]:
    """Call health checks beside the block, and add (time, seconds) of each to `checks`."""
    command = [sys.executable, "-m", "benchmarks.dataplane.loop_probe", daemon.socket_address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        if not probe.stdout.readline():
            raise BenchmarkError("the probe of the daemon's event loop did not begin")
        try:
            yield
        finally:
            out, _ = probe.communicate()
            checks += [(asked, took) for asked, took in json.loads(out or "[]")]


@contextmanager
def _admin(daemon: StoreDaemon) -> Iterator[Any]:
    with open_channel(daemon.socket_address, Credentials()) as channel:
        yield admin_grpc.StoreAdminStub(channel)


def _ask(daemon: StoreDaemon, size: Size, metrics: str, answers: Answers) -> None:
    """Make all calls, and check the number of jobs and shards that they return."""
    with ExitStack() as cleanup:
        admin = cleanup.enter_context(_admin(daemon))
        large_shards = size.large_tensors * len(SLABS)
        readings: dict[str, Callable[[], object]] = {
            "jobs": lambda: _expect("jobs", size.jobs, len(admin.ListJobs(admin_pb.ListJobsRequest()).jobs)),
            "shards of a job": lambda: _list_shards(admin, "run-00001", size.tensors * len(SLABS)),
            "shards of the large job": lambda: _list_shards(admin, LARGE_JOB, large_shards),
            "tiers": lambda: admin.GetTiers(admin_pb.GetTiersRequest()),
            "accounts": lambda: _check_accounts(admin),
            "metrics": lambda: _scrape(metrics, size.jobs),
            "page": lambda: _expect("jobs in the page", size.jobs, json.loads(_get(metrics, "/data.json"))["all_jobs"]),
        }
        for name, reading in readings.items():
            answers.take(name, reading)
        answers.take("all at once", lambda: _call_all(readings.values()))
        for verb, arguments in (("jobs", ["jobs"]), ("shards", ["shards", LARGE_JOB])):
            answers.take(f"{verb}, admin tool", partial(_run_admin_tool, daemon, arguments), 3)
        store = cleanup.enter_context(StoreClientSync.connect(daemon.socket_address))
        values = {"weight": torch.ones(16)}
        job = cleanup.enter_context(store.open("new", values, timeout=DEADLINE_SECONDS))

        def commit() -> None:
            job.put(values)
            job.commit()

        answers.take("commit", commit, COMMITS)
        doomed = iter(range(1, SAMPLES + 1))
        answers.take("delete", lambda: admin.DeleteJob(admin_pb.DeleteJobRequest(job=f"run-{next(doomed):05d}")))


def _list_shards(admin: Any, job: str, shards: int) -> None:
    request, found = admin_pb.ListShardsRequest(job=job), 0
    while True:
        page = admin.ListShards(request)
        found += len(page.shards)
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    _expect(f"shards of job {job}", shards, found)


def _check_accounts(admin: Any) -> None:
    for account in admin.GetAccounts(admin_pb.GetAccountsRequest()).accounts:
        _expect("bytes without a holder", 0, account.unexplained_bytes)


def _call_all(calls: Collection[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for called in [pool.submit(call) for call in calls]:
            called.result()


def _get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def _scrape(address: str, jobs: int) -> None:
    lines = _get(address, "/metrics").splitlines()
    (figure,) = (line for line in lines if line.startswith("paramserver_jobs "))
    _expect("jobs in the metrics", jobs, round(float(figure.split()[1])))


def _run_admin_tool(daemon: StoreDaemon, arguments: list[str]) -> None:
    program = "from paramserver.__main__ import admin; admin()"
    command = [sys.executable, "-c", program, *arguments, "--address", daemon.socket_address]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "160"})


def _expect(what: str, expected: int, found: int) -> None:
    if found != expected:
        raise BenchmarkError(f"the daemon has {found} {what}, and {expected} were made")


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown, with one table of the daemon and one of its answers."""
    parameters, starts = result["parameters"], (result["empty"], result["full"])
    about = (
        f"{parameters['jobs']:,} jobs with {parameters['shards']:,} shards: {parameters['shards_of_a_job']} for each "
        f"job, and {parameters['shards_of_the_large_job']:,} for a large one. The catalog's file has "
        f"{parameters['catalog_bytes'] / 2**20:.0f} MiB. Other programs ran on the machine meanwhile, so wall-clock "
        "times are upper bounds; the CPU time is the daemon's own."
    )
    rows: list[list[object]] = [
        ["start until it serves, s", *(start["start_seconds"] for start in starts)],
        ["CPU time until then, s", *(start["start_cpu_seconds"] for start in starts)],
        ["private memory, MiB", *(round(start["private_bytes"] / 2**20) for start in starts)],
        ["largest resident set, MiB", *(round(start["peak_bytes"] / 2**20) for start in starts)],
    ]
    answers: list[list[object]] = [
        [
            name,
            f"{1e3 * answer['median_seconds']:,.0f}",
            f"{1e3 * max(answer['seconds']):,.0f}",
            f"{1e3 * answer['longest_answer_seconds']:,.0f}",
        ]
        for name, answer in result["answers"].items()
    ]
    stalls = result["longest_loop_stall_seconds"]
    watch = f"its event loop blocked for {stalls:.2f} s" if stalls else "no stall of 0.1 s"
    return "\n\n".join(
        [
            about,
            report.table(("daemon", "without jobs", "with all jobs"), rows),
            "`other answer`: the slowest answer to a health check that another process calls every 10 ms meanwhile; it "
            f"includes all delays by the machine. The daemon's own watch saw {watch}.",
            report.table(("call", "median, ms", "longest, ms", "other answer, ms"), answers),
        ]
    )


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where the files go; they are removed.")] = DEFAULT_DIRECTORY,
    quick: Annotated[bool, typer.Option("--quick", help="Twenty jobs: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)

    def run_daemons() -> dict[str, Any]:
        with console.status("starting") as status, tempfile.TemporaryDirectory(dir=directory) as scratch:
            return measure(QUICK if quick else WHOLE, Path(scratch), status.update)

    report.run(
        "catalog",
        "A large catalog",
        "bench-catalog",
        run_daemons,
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        errors=(StorageError, TrainerClientError, subprocess.CalledProcessError),
    )


if __name__ == "__main__":
    app()
