"""Figures, checks and targets, computed from the standings of a heat, as JSON. Measures nothing itself.

The figures of a contestant, in seconds and bytes if no other unit is named:

- `not_run`: the reason why there are no other figures; null: there are
- `steps`: the time of each step that counts; `median`, `least`, `most`; `forward`, `backward`, `update` (medians)
- `settle`: the time from the end of a block until its background work is done (median)
- `ratios`: for each round, the step time divided by plain PyTorch's in the same round; `ratio` is their median
- `tokens_per_second`
- `memory`: the largest proportional memory (PSS) that was seen: `trainer`, `daemon`, `total`, and `ratio` to plain
  PyTorch's
- `read_per_step`, `written_per_step`: bytes from and to the disk
- `cpu_per_step`: CPU seconds of `trainer` and `daemon`
- `roofline`, medians over rounds: `compute` (plain PyTorch's step), `io` (the disk alone with the bytes of a step;
  null: not measured), `direct` (whether the disk was measured without the page cache), `seconds` (T_roof, the larger
  of `compute` and `io`), and `fraction` (T_roof / T_step)
- `losses` of all steps, and `loss_difference`, the largest difference to plain PyTorch's
- `facts`: what the contestant reports of itself after its last step
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.measure import BenchmarkError
from benchmarks.training.contestant_process import Block
from benchmarks.training.heat import Standing
from benchmarks.training.task import TrainingTask

# The difference of losses from which on a contestant of others does not train the same model.
LOSS_TOLERANCE = 2e-2


def summaries(standings: Sequence[Standing], task: TrainingTask) -> dict[str, dict[str, Any]]:
    """Return the figures of each contestant by its name; all are compared with the first one.

    Raises:
        BenchmarkError: see `check_losses`.
    """
    reference = standings[0]
    check_losses(standings)
    return {
        standing.entry.name: {"not_run": standing.not_run}
        if standing.not_run is not None
        else {"not_run": None} | summary(standing, reference, task)
        for standing in standings
    }


def check_losses(standings: Sequence[Standing]) -> None:
    """Compare the losses with those of plain PyTorch, if that is the first contestant.

    A standing whose losses differ by more than LOSS_TOLERANCE is marked as not run.

    Raises:
        BenchmarkError: this project's losses are not plain PyTorch's, bit for bit. On an accelerator they need not be,
            because the store's CPU and the device round in different ways.
    """
    reference = standings[0]
    if reference.entry.kind != "plain":
        return
    for standing in standings[1:]:
        # "compute" updates nothing, so that its losses are others from its second step on.
        if standing.not_run is not None or standing.entry.kind == "compute":
            continue
        difference = loss_difference(standing, reference)
        own = standing.entry.kind == "ours"
        if own and standing.entry.device == "cpu" and standing.losses != reference.losses:
            raise BenchmarkError(
                f"{standing.entry.name}: its losses are not those of plain PyTorch, bit for bit: they differ by up to "
                f"{difference:g}; {standing.losses} instead of {reference.losses}"
            )
        if difference > LOSS_TOLERANCE:
            standing.not_run = (
                f"its losses differ from plain PyTorch's by up to {difference:g}: it trains another model"
            )


def loss_difference(standing: Standing, reference: Standing) -> float:
    """Return the largest difference between the losses of the same step."""
    return max(abs(own - other) for own, other in zip(standing.losses, reference.losses, strict=True))


def summary(standing: Standing, reference: Standing, task: TrainingTask) -> dict[str, Any]:
    """Return the figures of a contestant that has run; see the module."""
    blocks, seconds = standing.blocks, _counted(standing.blocks, lambda block: block.seconds)
    ratios = [own / other for own, other in zip(standing.round_seconds(), reference.round_seconds(), strict=True)]
    median = statistics.median(seconds)
    assert standing.memory is not None and reference.memory is not None
    return {
        "steps": [round(value, 4) for value in seconds],
        "median": round(median, 4),
        "least": round(min(seconds), 4),
        "most": round(max(seconds), 4),
        "forward": _median(_counted(blocks, lambda block: block.forward)),
        "backward": _median(_counted(blocks, lambda block: block.backward)),
        "update": _median(_counted(blocks, lambda block: block.update)),
        "settle": _median([block.settle_seconds for block in blocks]),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "ratio": _median(ratios),
        "tokens_per_second": round(task.tokens_per_step / median, 1),
        "memory": {
            "trainer": standing.memory.main,
            "daemon": standing.memory.children,
            "total": standing.memory.total,
            "ratio": round(standing.memory.total / reference.memory.total, 4),
        },
        "read_per_step": _per_step(blocks, lambda block: block.use.bytes_read),
        "written_per_step": _per_step(blocks, lambda block: block.use.bytes_written),
        "cpu_per_step": {
            "trainer": round(_per_step(blocks, lambda block: block.use.main_cpu_seconds), 4),
            "daemon": round(_per_step(blocks, lambda block: block.use.children_cpu_seconds), 4),
        },
        "roofline": _roofline(standing, reference),
        "losses": standing.losses,
        "loss_difference": loss_difference(standing, reference),
        "facts": blocks[-1].facts,
    }


def targets(heats: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the project's targets with what was measured: `name`, `measured`, `wanted` (at most), `met`."""
    found: list[dict[str, Any]] = []

    def add(name: str, wanted: float, measured: Callable[[], float]) -> None:
        try:
            value = measured()
        except KeyError:  # The contestant was not run, or its heat was not asked for.
            return
        found.append({"name": name, "measured": round(value, 4), "wanted": wanted, "met": value <= wanted})

    add("host: step / plain PyTorch's", 1.05, lambda: heats["host"]["host"]["ratio"])
    add(
        "nvme: step / max(plain PyTorch's, I/O roofline)",
        1.10,
        lambda: 1 / heats["nvme"]["nvme"]["roofline"]["fraction"],
    )
    add(
        "nvme: step / DeepSpeed's on NVMe",
        0.7,
        lambda: heats["nvme"]["nvme"]["ratio"] / heats["nvme"]["DeepSpeed nvme"]["ratio"],
    )
    add("nvme: memory / plain PyTorch's", 0.55, lambda: heats["nvme"]["nvme"]["memory"]["ratio"])
    return found


def _roofline(standing: Standing, reference: Standing) -> dict[str, Any]:
    compute, own = reference.round_seconds(), standing.round_seconds()
    io = standing.io_seconds()
    roofs = [max(pair) for pair in zip(compute, io, strict=True)] if io else compute
    return {
        "compute": _median(compute),
        "io": _median(io) if io else None,
        "direct": all(probe.direct for probe in standing.probes) if io else None,
        "seconds": _median(roofs),
        "fraction": _median([roof / seconds for roof, seconds in zip(roofs, own, strict=True)]),
    }


def _counted(blocks: Sequence[Block], values_of: Callable[[Block], Sequence[float]]) -> list[float]:
    """Return one kind of values of all steps that count."""
    return [value for block in blocks for value in values_of(block)[1:]]


def _per_step(blocks: Sequence[Block], use_of: Callable[[Block], float]) -> float:
    """Return the mean over all steps, also the first of each block, because `use` is that of the whole block."""
    return sum(map(use_of, blocks)) / sum(len(block.seconds) for block in blocks)


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)
