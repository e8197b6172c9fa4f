"""Counts the bytes that a step moves for each parameter, with each way to train a model larger than memory.

One rank trains a GPT-2 in bf16 with AdamW, blocks checkpointed, everything on NVMe, at a daemon of its own whose host
memory holds a few layers, and whose scrubber is off. The bytes of NVMe and of lent memory are the daemon's counters
over all steps but the first. Seconds are not measured, so other programs may run beside it. The result is one JSON
object:

- `machine`, `provenance`, `parameters`
- `boundary_bytes`: of the boundaries of checkpoints of a step
- `choices`: for each one, by its name, in bytes for each parameter and step: `to_store`, `from_store` (what the rank
  leases counts each time), `nvme_read`, `nvme_written`, `lent_read`, `lent_written`; and `boundaries`, the bytes of the
  last step by place
- `expected_written`: for each choice, 14 bytes of updated parameters, master weights and moments, and 2 bytes, or 4
  with sums in fp32, for each time that a gradient leaves host memory

Run as a module from the root of the repository: `python -m benchmarks.training.costs`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import trainer_client
from benchmarks.common import machine, report
from benchmarks.common.measure import Progress
from benchmarks.common.store_daemon import StoreDaemon, started
from benchmarks.training import models
from benchmarks.training.task import HEAD_WIDTH, TrainingTask
from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
MIB = 1 << 20
# Parameters in bf16, master weights and two moments in fp32.
VERSION_BYTES = 14
# Two versions, and gradients.
DISK_BYTES_PER_PARAMETER = 34

FULL = TrainingTask(layers=24, hidden=256, batch=1, tokens=128, vocab=512, checkpoints=True)
FULL_BUDGET = 20 * MIB
QUICK = TrainingTask(layers=12, hidden=HEAD_WIDTH, batch=1, tokens=64, vocab=512, checkpoints=True)
QUICK_BUDGET = 7 * MIB // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train.

    Attributes:
        changes: fields of the task that differ.
        config: keys of the config.
        section: keys of its section `paramserver`.
        lent: whether the daemon borrows memory of another one, for all states.
        gradients_leave: how often a gradient leaves host memory in each step.
    """

    gradients_leave: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    section: Mapping[str, Any] = field(default_factory=dict)
    lent: bool = False


_CLIPPED = {"clip": 1.0}
_BOUNDARIES = {"activation_checkpointing": {"cpu_checkpointing": True}}
_MOVED = {"activations": {"smallest": 1024, "recompute": False}}
_AGAIN = {"activations": {"smallest": 1024, "recompute": True}}
_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}

CHOICES: Mapping[str, Variant] = {
    "clipping": Variant(gradients_leave=1, changes=_CLIPPED),
    "no clipping": Variant(gradients_leave=1),
    "no clipping, final": Variant(gradients_leave=0, section={"early_updates": "final"}),
    "clipping, accumulation 4": Variant(gradients_leave=4, changes={**_CLIPPED, "accumulation": 4}),
    "the same, sums in fp32": Variant(gradients_leave=4, changes={**_CLIPPED, "accumulation": 4}, config=_SUMS),
    "boundaries in the store": Variant(gradients_leave=1, changes=_CLIPPED, config=_BOUNDARIES, section=_MOVED),
    "boundaries again": Variant(gradients_leave=1, changes=_CLIPPED, config=_BOUNDARIES, section=_AGAIN),
    "tiles": Variant(gradients_leave=1, changes=_CLIPPED, section={"tiling": {"largest_tile": 128 << 10}}),
    "lent memory": Variant(gradients_leave=1, changes=_CLIPPED, lent=True),
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes since the start of a daemon."""

    nvme_read: int
    nvme_written: int
    lent_read: int
    lent_written: int

    @classmethod
    def of(cls, daemon: StoreDaemon) -> Counters:
        """Return the present ones of a daemon."""
        with channel_to(daemon.socket_address) as channel:
            found = StoreAdminStub(channel).GetTiers(admin_pb.GetTiersRequest(), timeout=30).tiers
        nvme = next(tier for tier in found if tier.tier == pb.TIER_NVME)
        remote = next((tier for tier in found if tier.tier == pb.TIER_REMOTE), admin_pb.TierInfo())
        return cls(nvme.bytes_read, nvme.bytes_written, remote.bytes_read, remote.bytes_written)


def measure(
    task: TrainingTask, budget: int, directory: Path, *, steps: int, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Train with each choice, and yield the result so far after each; see the module. It can raise BenchmarkError."""
    size = task.gpt2_parameters
    machine.check_free_bytes(directory, DISK_BYTES_PER_PARAMETER * size, f"a model of {size} parameters")
    found: dict[str, dict[str, Any]] = {}
    for name, choice in CHOICES.items():
        progress(name)
        found[name] = _train(replace(task, **choice.changes), choice, budget, directory, steps)
        yield {
            "parameters": {
                "parameters": size,
                "layers": task.layers,
                "hidden": task.hidden,
                "tokens": task.tokens_per_step,
                "steps": steps,
                "host_budget_bytes": budget,
            },
            "boundary_bytes": task.layers * task.tokens_per_step * task.hidden * 2,
            "choices": dict(found),
            "expected_written": {done: _expected(CHOICES[done]) for done in found},
        }


def _expected(choice: Variant) -> int:
    return VERSION_BYTES + choice.gradients_leave * (4 if choice.config == _SUMS else 2)


def _train(task: TrainingTask, choice: Variant, budget: int, directory: Path, steps: int) -> dict[str, Any]:
    """Return the figures of one choice."""
    size = task.gpt2_parameters
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        config: dict[str, Any] = {"host_budget": budget, "nvme_budget": 64 * MIB + 40 * size, "scrub_bandwidth": 0}
        if choice.lent:
            (place / "lender").mkdir()
            lends = {"host_budget": 32 * MIB + 20 * size, "lend_budget": 16 * MIB + 18 * size}
            lender = stack.enter_context(started(place / "lender", lends))
            remote = {"lenders": [lender.socket_address], "budget": 16 * MIB + 18 * size, "use": "always"}
            config["remote"] = remote
        daemon = stack.enter_context(started(place, config))
        section = {
            "address": daemon.socket_address,
            "job": "costs",
            "placement": {"parameters": "nvme", "optimizer": "nvme"},
            **choice.section,
        }
        torch.manual_seed(1)
        engine, *_ = trainer_client.initialize(
            model=models.build(task), config={**task.deepspeed_config(), **choice.config, "paramserver": section}
        )
        with engine:
            tokens = torch.randint(0, task.vocab, (task.batch, task.tokens))
            leased, before = {"store_to_trainer": 0, "trainer_to_store": 0}, Counters.of(daemon)
            boundaries: Mapping[str, int] = {}
            for step in range(steps + 1):
                for _ in range(task.accumulation):
                    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                    engine.step()
                engine.wait_for_commit()
                done = engine.step_report()
                assert done is not None, "a step was made"
                boundaries = done.boundaries
                if step == 0:
                    # The first step learns the order of the units.
                    before = Counters.of(daemon)
                else:
                    leased = {link: leased[link] + done.bytes[link] for link in leased}
            after = Counters.of(daemon)
    counted = {name: getattr(after, name) - getattr(before, name) for name in Counters.__slots__}
    counted |= {"to_store": leased["trainer_to_store"], "from_store": leased["store_to_trainer"]}
    per_parameter = {name: round(nbytes / steps / size, 2) for name, nbytes in counted.items()}
    return per_parameter | {"boundaries": dict(boundaries)}


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown: a table of bytes for each parameter and step."""
    shape = result["parameters"]
    columns = ("to_store", "from_store", "nvme_read", "nvme_written", "lent_read", "lent_written")
    rows = [
        [
            name,
            *(f"{figures[column]:.1f}" for column in columns),
            str(result["expected_written"][name]),
            ", ".join(f"{where} {nbytes / MIB:.1f}" for where, nbytes in figures["boundaries"].items() if nbytes)
            or None,
        ]
        for name, figures in result["choices"].items()
    ]
    header = (
        "",
        *("rank to store", "store to rank", "NVMe read", "NVMe written", "lenders read", "lenders written"),
        *("written, expected", "boundaries, MiB"),
    )
    return "\n\n".join(
        (
            f"Bytes for each parameter and step. GPT-2 of {shape['layers']} layers x {shape['hidden']} "
            f"({shape['parameters'] / 1e6:.1f} M parameters), blocks checkpointed, {shape['tokens']} tokens in a "
            f"micro-batch, bf16, AdamW; everything on NVMe, `host_budget` {shape['host_budget_bytes'] / MIB:.1f} MiB, "
            f"so that gradients do not fit. The boundaries of a micro-batch have {result['boundary_bytes'] / MIB:.1f} "
            "MiB.",
            report.table(header, rows),
        )
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = DEFAULT_DIRECTORY,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, after the first one.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, two steps: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    task, budget, steps = (QUICK, QUICK_BUDGET, 2) if quick else (FULL, FULL_BUDGET, steps)
    report.run(
        "costs",
        "Bytes of a step by the way a large model is trained",
        "bench-costs",
        lambda: measure(task, budget, directory, steps=steps, progress=console.print),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
    )


if __name__ == "__main__":
    app()
