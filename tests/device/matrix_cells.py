"""The cells of the matrix on the simulated device, and the schedules of lag under which each of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.device.training_on_lanes import LANES, Lateness
from tests.integration.support.matrix_cells import PLACES, TRAININGS, run_of
from tests.integration.support.training import Run

# Makes a run as a job of the store at an address: (address, job, number of ranks).
Cell = Callable[[str, str, int], Run]

# The models that are hard to gather train at these places only.
_HARD_PLACES = ("zero-2 + optimizer host", "zero-3 + everything nvme", "zero-3 + everything host", "zero-3 + fractions")
_CHECKPOINTING = ("none", "reentrant", "non-reentrant")

PROMPT = Lateness()


def _placed(training: str, place: str, **keys: Any) -> Cell:
    def make(address: str, job: str, world_size: int) -> Run:
        run = run_of(training, place, world_size, address, job)
        return replace(run, config=run.config | {"paramserver": run.config["paramserver"] | keys})

    return make


def _hard(checkpointing: Any, place: str) -> Cell:
    def make(address: str, job: str, world_size: int) -> Run:
        run = run_of("fp32", place, world_size, address, job)
        return replace(run, model="conditional", checkpointing=checkpointing, steps=3, with_masters=False)

    return make


def _over_streams(place: str) -> Cell:
    def make(address: str, job: str, world_size: int) -> Run:
        return replace(run_of("fp32, each micro-batch", place, world_size, address, job), prefer_streams=True)

    return make


def cells() -> Mapping[str, Cell]:
    """Return all cells by name."""
    found = {f"{training} | {place}": _placed(training, place) for training in TRAININGS for place in PLACES}
    found |= {f"conditional, {how} | {place}": _hard(how, place) for how in _CHECKPOINTING for place in _HARD_PLACES}
    found |= {f"streams | {place}": _over_streams(place) for place in PLACES if "nvme" in place or "host" in place}
    one_sided = ("zero-3 + everything nvme", "zero-3 + everything host")
    found |= {f"gather from the store | {p}": _placed("fp32, each micro-batch", p, gather="store") for p in one_sided}
    return found


# The part that `make test` runs on two ranks. Its other tests have more models and places, under fewer schedules.
PART = ("fp32, poisoned | zero-3 + fractions", "mixed | zero-3 + everything nvme")


def training_of(cell: str) -> str:
    """Return which numbers the cell computes: cells that have this in common have the same bits at all places."""
    training = cell.partition(" | ")[0]
    if training in ("streams", "gather from the store"):
        return "fp32, each micro-batch"
    # Reentrant checkpoints add up the gradient of an input of several blocks in another order, in plain torch, too.
    return "conditional" if training in ("conditional, none", "conditional, non-reentrant") else training


def latenesses(seeds: int, number: int, world_size: int) -> Mapping[str, Lateness]:
    """Return the schedules of the cell with this number, by name; the first one is without lag.

    Each cell runs with all streams late, with one of the streams very late, and with random lags. The stream is that of
    the compute or a lane, in turn from cell to cell.
    """
    streams = ["compute", *(lane for lane in LANES if world_size > 1 or lane != "comm")]
    chosen = streams[number % len(streams)]
    alone = Lateness(compute_ms=300) if chosen == "compute" else Lateness(lane_ms={chosen: 300})
    found = {"prompt": PROMPT, "all 3 ms": Lateness(all_ms=3), f"{chosen} 300 ms": alone}
    return found | {f"random {seed}": Lateness(random_ms=20, seed=seed) for seed in range(1, seeds + 1)}
