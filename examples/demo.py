"""The whole system on one machine: a store daemon, two trainer ranks, a kill in the middle, an exact resume.

Runs `train_gpt2.py` (a byte-level GPT-2, ZeRO-3, everything on the nvme tier), ends torchrun and both ranks with
SIGKILL while a step is under way, and starts them again. Then it checks that they resumed from the last committed step
with the same weights and losses, bit for bit. The last line of the output is a JSON object with the figures.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from demo_support.errors import DemoError
from demo_support.journal import Journal
from demo_support.launch import Launch
from demo_support.report import ProgressLine, print_loss_curve
from demo_support.store_daemon import StoreDaemon
from demo_support.verdict import Verdict, judge
from rich.console import Console

TRAINER = Path(__file__).with_name("train_gpt2.py")
DEFAULT_DIRECTORY = Path(__file__).parents[1] / "build" / "demo"
JOB = "gpt2"  # the name of the job in train_gpt2.json
RANKS = 2
HOST_BUDGET = "256MiB"
NVME_BUDGET = "2GiB"
# The trainers record a digest of the weights every DIGEST_EVERY steps. The kill comes in the step after a digest.
DIGEST_EVERY = 10
MIN_STEPS = 40
POLL_SECONDS = 0.01
COMMIT_SECONDS = 10.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The journals of both launches, and what they show."""

    first: Journal
    second: Journal
    verdict: Verdict
    seconds: float


@contextmanager
def run_directory(parent: Path, *, keep: bool) -> Iterator[Path]:
    """Yield a new directory under `parent`; remove it at the end of the block unless `keep` is true."""
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use.

    Another process asks torch, because an import of torch cannot be interrupted cleanly.
    """
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def trainer_environment(address: str) -> dict[str, str]:
    """Return the environment of a launch: the store's address, and an equal share of the machine for each rank."""
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    environment = os.environ | {"PARAMSERVER_ADDRESS": address, "OMP_NUM_THREADS": str(threads)}
    if count_gpus() < RANKS:
        # Without a GPU for each rank, no rank uses one, and the ranks communicate over gloo.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def follow(launch: Launch, daemon: StoreDaemon, progress: ProgressLine, *, until: int | None, phase: str) -> None:
    """Wait until every rank has computed the loss of step `until`, or (None) until the launch has ended.

    Raises:
        DemoError: the launch failed, or it ended before step `until`; or the daemon stopped.
    """
    while not launch.poll():
        daemon.check()
        journal = launch.journal
        progress.show(journal)
        if until is not None and journal.newest_step >= until:
            return
        progress.phase(phase if journal.started else "starting")
        time.sleep(POLL_SECONDS)
    progress.show(launch.journal)
    if until is not None:
        raise DemoError(f"the trainers ended at step {launch.journal.newest_step}, before they could be killed")


def committed_step(daemon: StoreDaemon, expected: int) -> int:
    """Return the job's newest committed step, once the store has ended the killed ranks' sessions and commits.

    `expected` is a step that is known to be committed. After COMMIT_SECONDS, return the newest step in any case.
    """
    deadline = time.monotonic() + COMMIT_SECONDS
    while True:
        job = next(job for job in daemon.query("jobs")["jobs"] if job["name"] == JOB)
        step: int = job["committed_step"]
        if (job["sessions"] == 0 and step >= expected) or time.monotonic() > deadline:
            return step


def train(steps: int, directory: Path, daemon: StoreDaemon, progress: ProgressLine) -> Trained:
    """Launch the trainers, kill them in the middle, launch them again up to step `steps`, and judge both launches."""
    started = time.monotonic()
    environment = trainer_environment(daemon.address)
    arguments = ["--steps", str(steps), "--digest-every", str(DIGEST_EVERY)]
    kill_at = steps // (2 * DIGEST_EVERY) * DIGEST_EVERY + 1

    def launch(number: int) -> Launch:
        here = directory / f"launch-{number}"
        return Launch(TRAINER, arguments, ranks=RANKS, directory=here, environment=environment)

    with launch(1) as first:
        follow(first, daemon, progress, until=kill_at, phase="training")
        pids = first.kill()
        first.journal.refresh()
    progress.phase("killed")
    committed = committed_step(daemon, expected=kill_at - 1)
    progress.say(
        f"[bold red]killed[/] with the loss of step {first.journal.newest_step} computed: SIGKILL to torchrun and its "
        f"ranks (pids {', '.join(map(str, pids))}); the store has committed step {committed}"
    )
    with launch(2) as second:
        follow(second, daemon, progress, until=1, phase="resuming")
        resumed = second.journal.starts[0].resumed_step
        progress.say(f"[bold green]resumed[/] from step {resumed}")
        follow(second, daemon, progress, until=steps, phase="resumed")
        follow(second, daemon, progress, until=None, phase="generating")
    return Trained(
        first=first.journal,
        second=second.journal,
        verdict=judge(first.journal, second.journal, committed_at_kill=committed),
        seconds=time.monotonic() - started,
    )


def report(console: Console, trained: Trained, daemon: StoreDaemon) -> None:
    """Print the loss curve, the store's tiers and jobs, the model's text, and what was compared."""
    verdict, start = trained.verdict, trained.second.starts[0]
    console.print()
    print_loss_curve(console, verdict, start.byte_entropy)
    console.print()
    daemon.show("tiers")
    daemon.show("jobs")
    text = (trained.second.text or "").replace("\n", "⏎")
    console.print(f"\n[bold]the model writes:[/] {printable(text)}", highlight=False, soft_wrap=True)
    steps = ", ".join(map(str, verdict.compared_steps)) or "none"
    console.print(
        f"[bold]compared:[/] sha256 of all fp32 weights at step {verdict.resumed_from} before the kill and after the "
        f"resume; the losses that both launches computed (steps: {steps}), on each rank, bit for bit",
        highlight=False,
        soft_wrap=True,
    )


def printable(text: str) -> str:
    """Return a model's text without control characters and rich's markup."""
    return "".join(c if c.isprintable() else "·" for c in text).replace("[", "\\[")


def figures(trained: Trained, daemon: StoreDaemon) -> dict[str, Any]:
    """Return the figures of the demo, which are printed as one line of JSON."""
    verdict, start = trained.verdict, trained.second.starts[0]
    counted = [journal.tokens_and_seconds() for journal in (trained.first, trained.second)]
    tiers = {tier["tier"].removeprefix("TIER_").lower(): tier for tier in daemon.query("tiers")["tiers"]}
    return {
        "ok": not verdict.problems,
        "steps": trained.second.newest_step,
        "parameters": start.parameters,
        "ranks": RANKS,
        "device": start.device,
        "data_plane": start.data_plane,
        "first_loss": round(verdict.first_loss, 4),
        "last_loss": round(verdict.last_loss, 4),
        "loss_limit": round(verdict.loss_limit, 4),
        "killed_at": verdict.killed_at,
        "resumed_from": verdict.resumed_from,
        "compared_steps": list(verdict.compared_steps),
        "resume_exact": verdict.resume_exact,
        "seconds": round(trained.seconds, 1),
        "tokens_per_second": round(sum(t for t, _ in counted) / sum(s for _, s in counted)),
        "daemon_peak_resident_bytes": daemon.memory.resident,
        "daemon_peak_private_bytes": daemon.memory.private,
        "daemon_peak_mapped_bytes": daemon.memory.mapped,
        "budget_bytes": {name: tier["budget_bytes"] for name, tier in tiers.items()},
        "used_bytes": {name: tier["used_bytes"] for name, tier in tiers.items()},
    }


def run(steps: int, parent: Path, *, keep: bool) -> tuple[str, ...]:
    """Run the demo, and return the problems of its outcome; empty if there are none."""
    console = Console()
    with run_directory(parent, keep=keep) as directory:
        state_dir = directory / "store"
        console.print(f"store daemon: host {HOST_BUDGET}, nvme {NVME_BUDGET} under {state_dir}", soft_wrap=True)
        with StoreDaemon(
            state_dir=state_dir, log_path=directory / "daemon.log", host_budget=HOST_BUDGET, nvme_budget=NVME_BUDGET
        ) as daemon:
            with ProgressLine(console, steps) as progress:
                trained = train(steps, directory, daemon, progress)
            report(console, trained, daemon)
            print(json.dumps(figures(trained, daemon)), flush=True)
    return trained.verdict.problems


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


@app.command(help=__doc__)
def main(
    steps: Annotated[int, typer.Option(min=MIN_STEPS, help="Steps of training.")] = 120,
    directory: Annotated[Path, typer.Option("--dir", help="Where the store and the logs go.")] = DEFAULT_DIRECTORY,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the store, the logs and the records.")] = False,
) -> None:
    """Run the demo, print its problems, and exit with status 1 if there are any."""
    # SIGTERM raises SystemExit, at which the contexts end the child processes.
    signal.signal(signal.SIGTERM, _end)
    try:
        problems = run(steps, directory, keep=keep)
    except (DemoError, OSError) as error:
        problems = (str(error),)
    except KeyboardInterrupt:
        typer.echo("interrupted; all processes of the demo have ended", err=True)
        raise typer.Exit(130) from None
    for problem in problems:
        typer.echo(f"demo: {problem}", err=True)
    raise typer.Exit(bool(problems))


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        app()
