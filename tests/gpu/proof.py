"""Proves everything on a machine with a GPU: `python -m tests.gpu.proof [--part N] [--report DIR]` (`make gpu-proof`).

Four parts of at most nine minutes each: whether it runs and is right; NCCL and late writes; kills; speed. The steps of
a part run one after the other, each with a limit of time, and a part ends at the first one that fails, because later
steps build on it. The report (report.md and report.json) says of every step whether it passed, failed or was not run,
and each step's output is in a file of its own. Nothing is needed from the network.

On a machine without a GPU, `--stand-in` runs the steps that need no driver on the simulated device. That shows that the
proof itself works, and the report says that nothing was proved about a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tests.gpu.accelerator import STAND_IN
from tests.gpu.facts import facts

ROOT = Path(__file__).parents[2]
PART_SECONDS = 540
# A step does not begin if less of its part's time is left.
LEAST_SECONDS = 10.0
# All limits of time are so many times longer on the simulated device, whose machine may have two cores.
STAND_IN_PATIENCE = 10
# The lines of a step's output that are its figures, besides the summary of pytest.
_FIGURE = re.compile(r"GB/s|s/GiB|after the kill|were queued|losses \[|of the GPU's memory|MiB less free")
_SUMMARY = re.compile(r"\d+ (passed|failed|skipped|error)")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the proof.

    Attributes:
        what: what it proves.
        arguments: those of the Python interpreter that runs it.
        seconds: it fails if it takes longer.
        variables: added to the environment.
        needs_cuda: the simulated device cannot stand in.
    """

    what: str
    arguments: Sequence[str]
    seconds: int
    variables: Mapping[str, str] = field(default_factory=dict)
    needs_cuda: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a step. `figures` are the lines of its output that the report repeats."""

    part: int
    what: str
    command: str
    outcome: str
    seconds: float = 0.0
    figures: Sequence[str] = ()


def tests_in(*files: str, only: str = "") -> list[str]:
    """Return the arguments that run test files of this folder and print what they measure."""
    chosen = ["-k", only] if only else []
    return [
        *("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-m", "gpu", *chosen),
        *(f"tests/gpu/{file}" for file in files),
    ]


PARTS: Mapping[int, Sequence[Step]] = {
    1: (
        Step(what="the machine's facts", arguments=["-m", "tests.gpu.facts"], seconds=60),
        Step(
            what="the trainer's unit tests with this build of torch, without a GPU",
            arguments=["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit/trainer_client"],
            seconds=240,
        ),
        Step(
            what="update rules equal torch's fused optimizers, placements equal each other, states leave the device",
            arguments=tests_in("test_update_rules.py", "test_parity.py", "test_state_offload.py"),
            seconds=90,
            needs_cuda=True,
        ),
        Step(what="stages and placements beside plain PyTorch", arguments=tests_in("test_stages.py"), seconds=180),
        Step(what="copies that stay on the device", arguments=tests_in("test_gpu_tier.py"), seconds=120),
        Step(what="models and uses of a model", arguments=tests_in("test_models.py"), seconds=180),
        Step(what="resume with dropout", arguments=tests_in("test_resume.py"), seconds=90),
        *(
            Step(
                what=f"no access without an order of streams, {place}",
                arguments=["-m", "tests.gpu.one_run", place],
                seconds=60,
                variables={"TORCH_CUDA_SANITIZER": "1"},
                needs_cuda=True,
            )
            for place in ("nvme", "host", "fractions")
        ),
        Step(
            what="registration of the arena, and the speed of copies",
            arguments=tests_in("test_registration.py"),
            seconds=150,
            needs_cuda=True,
        ),
        Step(what="a device without memory", arguments=tests_in("test_out_of_memory.py"), seconds=60),
    ),
    2: (
        Step(
            what="two ranks on one device, and 200 steps of them",
            arguments=tests_in("test_collectives.py"),
            seconds=240,
            variables={"NCCL_LAUNCH_ORDER_IMPLICIT": "1"},
        ),
        Step(
            what="how long a GPU writes after a kill, and that the daemon waits for it",
            arguments=tests_in("test_late_writes.py"),
            seconds=400,
            needs_cuda=True,
        ),
    ),
    3: (
        Step(
            what="a hundred kills of trainers and the daemon",
            arguments=tests_in("test_life.py"),
            seconds=PART_SECONDS,
            variables={"PARAMSERVER_KILLS": "100", "PARAMSERVER_KILL_JOBS": "5"},
        ),
    ),
    4: (
        Step(
            what="a step beside plain PyTorch, FSDP2 and the roofline",
            arguments=["-m", "benchmarks.training.gpu"],
            seconds=500,
            needs_cuda=True,
        ),
    ),
}


def run_part(number: int, directory: Path, *, stand_in: bool, progress: Console) -> list[Outcome]:
    """Run a part's steps until one fails or the part's time is over; write each step's output to `directory`."""
    patience = STAND_IN_PATIENCE if stand_in else 1
    ends = time.monotonic() + PART_SECONDS * patience
    found: list[Outcome] = []
    for index, step in enumerate(PARTS[number], start=1):
        variables = dict(step.variables) | ({STAND_IN: "1"} if stand_in else {})
        words = [*(f"{name}={value}" for name, value in variables.items()), "python", *step.arguments]
        command, left = " ".join(words), ends - time.monotonic()
        if reason := _obstacle(step, found, left, stand_in=stand_in):
            found.append(Outcome(part=number, what=step.what, command=command, outcome=f"not run: {reason}"))
            continue
        progress.print(f"part {number}, step {index} of {len(PARTS[number])}: {step.what}", highlight=False)
        log = directory / f"part-{number}-step-{index}.log"
        found.append(_run(number, step, command, variables, min(step.seconds * patience, left), log))
        progress.print(f"  {found[-1].outcome} after {found[-1].seconds:.0f} s", highlight=False)
    return found


def _obstacle(step: Step, before: Sequence[Outcome], left_seconds: float, *, stand_in: bool) -> str | None:
    """Return why a step cannot be run; None if it can."""
    if any(one.outcome.startswith("failed") for one in before):
        return "a step before failed"
    if stand_in and step.needs_cuda:
        return "needs a CUDA device"
    return "no time was left" if left_seconds < LEAST_SECONDS else None


def _run(number: int, step: Step, command: str, variables: Mapping[str, str], seconds: float, log: Path) -> Outcome:
    began = time.monotonic()
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [sys.executable, *step.arguments],
                cwd=ROOT,
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
            outcome = "passed" if done.returncode == 0 else f"failed: exit code {done.returncode}, see {log.name}"
        except subprocess.TimeoutExpired:
            outcome = f"failed: it took longer than {seconds:.0f} s, see {log.name}"
    lines = log.read_text(errors="replace").splitlines()
    summary = [line for line in lines if _SUMMARY.search(line)][-1:]
    if outcome == "passed" and summary and "passed" not in summary[0]:
        outcome = "not run: all of its tests were skipped"
    return Outcome(
        part=number,
        what=step.what,
        command=command,
        outcome=outcome,
        seconds=round(time.monotonic() - began, 1),
        figures=[line.strip(". ") for line in lines if _FIGURE.search(line)] + summary,
    )


def report_of(outcomes: Sequence[Outcome], machine: Mapping[str, Any], *, stand_in: bool) -> str:
    """Return the report as Markdown."""
    lines = ["# Proof on a GPU", ""]
    if stand_in:
        lines += ["**The simulated device stood in for a GPU: nothing here is proved of CUDA or NCCL.**", ""]
    lines += [
        "```json",
        json.dumps(machine, indent=1),
        "```",
        "",
        "| part | step | outcome | s |",
        "| ---: | --- | --- | ---: |",
    ]
    lines += [f"| {one.part} | {one.what} | {one.outcome} | {one.seconds:.0f} |" for one in outcomes]
    for one in outcomes:
        if one.figures:
            lines += ["", f"## {one.what}", "", f"`{one.command}`", "", "```", *one.figures, "```"]
    return "\n".join(lines) + "\n"


@app.command(help=__doc__)
def main(
    parts: Annotated[list[int] | None, typer.Option("--part", min=1, max=4, help="Only this one; repeatable.")] = None,
    report: Annotated[Path, typer.Option("--report", help="The folder of the report.")] = ROOT / "build/gpu-proof",
    stand_in: Annotated[bool, typer.Option("--stand-in", help="Use the simulated device.")] = False,
) -> None:
    """Run the parts, write the report, and exit with 1 if a step failed or nothing was run."""
    if not stand_in and not torch.cuda.is_available():
        typer.echo("gpu-proof: torch finds no CUDA device here; --stand-in runs what needs none", err=True)
        raise typer.Exit(2)
    report.mkdir(parents=True, exist_ok=True)
    progress = Console(stderr=True)
    outcomes: list[Outcome] = []
    machine = facts()
    for number in sorted(parts or PARTS):
        outcomes += run_part(number, report, stand_in=stand_in, progress=progress)
        # The report is written after each part, so that it is there if the machine is taken away in the next one.
        (report / "report.md").write_text(report_of(outcomes, machine, stand_in=stand_in))
        (report / "report.json").write_text(
            json.dumps({"machine": machine, "stand_in": stand_in, "steps": [asdict(one) for one in outcomes]}, indent=1)
        )
    typer.echo(report_of(outcomes, machine, stand_in=stand_in))
    if any(one.outcome.startswith("failed") for one in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
