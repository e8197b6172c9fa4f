"""Measures memory and seconds of a step with the boundaries of activation checkpoints in different places.

The model is GPT-2 with a long sequence, in fp32, one micro-batch in a step. The contestants take turns, each in a
process of its own:

- `plain`: PyTorch with torch's checkpoints, everything in memory
- `whole`: the engine without checkpoints, so that nothing is computed twice
- `device`: the engine with checkpoints, whose boundaries stay on the device
- `host`, `nvme`: the same, with `activation_checkpointing.cpu_checkpointing`, and a host budget that has room for all
  boundaries, or for a few
- `again`: as `host`, and each second boundary is not kept but computed again

Those with the engine have all states on NVMe. The result is one JSON object:

- `machine`, `provenance`, `parameters`
- `boundary_bytes`: of all boundaries of a step
- `contestants`: for each one `seconds` of all steps but the first of each turn, their `median`, `memory_bytes` (the
  most anonymous memory of the trainer, beyond that before the first step), `boundaries` and `waited_seconds` of the
  last step's report, and the ratios of the medians `to_plain` and `to_device`

Run as a module from the root of the repository: `python -m benchmarks.training.activations`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

import trainer_client
from benchmarks.common import report
from benchmarks.common.measure import BenchmarkError, Progress
from trainer_client.base.recorder import Cause

ROOT = Path(__file__).parents[2]
DEFAULT_DIRECTORY = ROOT / "build" / "bench"
MIB = 1 << 20
NAMES = ("plain", "whole", "device", "host", "nvme", "again")
_MOVING = ("host", "nvme", "again")
_SAMPLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The model and its batch; budgets in bytes."""

    layers: int
    hidden: int
    tokens: int
    vocab: int
    host_budget: int
    small_budget: int
    smallest: int

    @property
    def boundary_bytes(self) -> int:
        """The bytes of the boundaries of one step."""
        return self.layers * self.tokens * self.hidden * 4


FULL = Task(layers=12, hidden=256, tokens=4096, vocab=512, host_budget=256 * MIB, small_budget=48 * MIB, smallest=MIB)
QUICK = Task(layers=6, hidden=64, tokens=256, vocab=128, host_budget=32 * MIB, small_budget=6 * MIB, smallest=1024)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _config(task: Task, name: str, directory: Path) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "activation_checkpointing": {"cpu_checkpointing": name in _MOVING},
        "paramserver": {
            "host_budget": task.small_budget if name == "nvme" else task.host_budget,
            "nvme_budget": "4GiB",
            "activations": {"smallest": task.smallest, "recompute": name == "again"} if name in _MOVING else {},
        },
    }


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError("/proc/self/status has no RssAnon")


@contextmanager
def _watching_memory() -> Iterator[list[int]]:
    """Yield a list whose only element is the most anonymous memory of this process within the context."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            most[0] = max(most[0], _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def contest(task: Task, name: str, directory: Path, steps: int) -> dict[str, Any]:
    """Train as one contestant in this process, and return its figures."""
    torch.manual_seed(0)
    shape = GPT2Config(
        n_layer=task.layers,
        n_embd=task.hidden,
        n_head=4,
        vocab_size=task.vocab,
        n_positions=task.tokens,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = GPT2LMHeadModel(shape).train()
    if name != "whole":
        model.activation_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, task.vocab, (1, task.tokens))
    engine = None
    if name == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        made, *_ = trainer_client.initialize(model=model, config=_config(task, name, directory))
        assert isinstance(made, trainer_client.Engine)
        engine = made

        def step() -> None:
            made.backward(made(input_ids=tokens, labels=tokens).loss)
            made.step()

    before, seconds = _anonymous_bytes(), []
    with _watching_memory() as most:
        for _ in range(steps):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
    result: dict[str, Any] = {"seconds": seconds[1:], "memory_bytes": most[0] - before}
    if engine is not None:
        found = engine.step_report()
        assert found is not None
        result["boundaries"] = dict(found.boundaries)
        result["waited_seconds"] = found.stall_seconds.get(Cause.ACTIVATION.value, 0.0)
        engine.close()
    return result


def _turn(task: Task, name: str, directory: Path, steps: int) -> dict[str, Any]:
    """Run a contestant in a process of its own."""
    with tempfile.TemporaryDirectory(dir=directory) as states:
        arguments = json.dumps({"task": asdict(task), "name": name, "directory": states, "steps": steps})
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.training.activations", "--contestant", arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise BenchmarkError(f"{name} has failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(task: Task, directory: Path, *, rounds: int, steps: int, progress: Progress) -> dict[str, Any]:
    """Measure all contestants in turns, and return the result; see the module. It can raise BenchmarkError."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for number in range(rounds):
        for name in NAMES:
            progress(f"{name}: round {number + 1} of {rounds}")
            turns[name].append(_turn(task, name, directory, steps))
    medians = {name: statistics.median(s for turn in turns[name] for s in turn["seconds"]) for name in NAMES}
    return {
        "parameters": asdict(task) | {"rounds": rounds, "steps": steps},
        "boundary_bytes": task.boundary_bytes,
        "contestants": {
            name: {
                "seconds": [round(seconds, 4) for turn in turns[name] for seconds in turn["seconds"]],
                "median": round(medians[name], 4),
                "memory_bytes": max(turn["memory_bytes"] for turn in turns[name]),
                "boundaries": turns[name][-1].get("boundaries"),
                "waited_seconds": turns[name][-1].get("waited_seconds"),
                "to_plain": round(medians[name] / medians["plain"], 4),
                "to_device": round(medians[name] / medians["device"], 4),
            }
            for name in NAMES
        },
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown."""
    shape = result["parameters"]
    rows = []
    for name, figures in result["contestants"].items():
        moved = figures["boundaries"] or {}
        rows.append(
            [
                name,
                f"{figures['median']:.2f}",
                f"{figures['to_plain']:.2f}",
                f"{figures['to_device']:.2f}",
                f"{figures['memory_bytes'] / MIB:.0f}",
                f"{moved['moved'] / MIB:.0f}" if moved else None,
                f"{moved['spilled'] / MIB:.0f}" if moved else None,
                f"{moved['again'] / MIB:.0f}" if moved else None,
                None if figures["waited_seconds"] is None else f"{figures['waited_seconds']:.2f}",
            ]
        )
    return "\n\n".join(
        (
            f"GPT-2 of {shape['layers']} layers, width {shape['hidden']}, 1 x {shape['tokens']} tokens, fp32, AdamW. "
            f"The boundaries of a step have {result['boundary_bytes'] / MIB:.0f} MiB. `plain` is PyTorch with torch's "
            "checkpoints in memory; `whole` has no checkpoints, `device` has, and with `host` and `nvme` their "
            f"boundaries are in the store, whose host budget is {shape['host_budget'] / MIB:.0f} MiB, or "
            f"{shape['small_budget'] / MIB:.0f} MiB so that most are spilled. `again` is `host` with each second "
            "boundary computed again. All but `plain` have their states on NVMe. Memory is the most anonymous memory "
            "of the trainer beyond that before the first step, which for `plain` includes gradients and optimizer "
            "states.",
            report.table(
                (
                    "",
                    "s/step",
                    "/ plain",
                    "/ device",
                    "memory, MiB",
                    "moved, MiB",
                    "spilled, MiB",
                    "again, MiB",
                    "waited, s",
                ),
                rows,
            ),
        )
    )


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = DEFAULT_DIRECTORY,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contestant.")] = 1,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a turn; the first does not count.")] = 3,
    contestant: Annotated[str, typer.Option(hidden=True, help="Run one contestant in this process.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, one round: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    if contestant:
        given = json.loads(contestant)
        figures = contest(Task(**given["task"]), given["name"], Path(given["directory"]), given["steps"])
        typer.echo(json.dumps(figures))
        return
    task, rounds, steps = (QUICK, 1, 2) if quick else (FULL, rounds, steps)
    report.run(
        "activations",
        "Boundaries of activation checkpoints",
        "bench-activations",
        lambda: measure(task, directory, rounds=rounds, steps=steps, progress=Console(stderr=True).print),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
    )


if __name__ == "__main__":
    app()
