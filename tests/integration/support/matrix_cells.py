"""The cells of the engine's matrix: what is trained, at which stage, and where its states are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.integration.support.training import MICRO_BATCH, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stage, where its states are stored, and how often the store receives them."""

    stage: int
    placement: dict[str, Any]
    durability: str = "step"


# In the first places all states are on the device, at every stage. In the later ones the store holds some of them.
PLACES = {
    "ddp": Place(stage=0, placement={}, durability="snapshot:2"),
    "zero-1": Place(stage=1, placement={}, durability="none"),
    "zero-2": Place(stage=2, placement={"gradients": "host"}),
    "zero-3": Place(stage=3, placement={}, durability="snapshot:2"),
    "zero-1 + optimizer nvme": Place(stage=1, placement={"optimizer": "nvme", "gradients": "device"}),
    "zero-2 + optimizer host": Place(stage=2, placement={"optimizer": "host"}),
    "zero-3 + everything nvme": Place(stage=3, placement={"parameters": "nvme", "optimizer": "nvme"}),
    "zero-3 + everything host": Place(stage=3, placement={"parameters": "host", "optimizer": "host"}),
    "zero-3 + optimizer host": Place(stage=3, placement={"optimizer": "host"}),
    "zero-3 + parameters nvme": Place(stage=3, placement={"parameters": "nvme"}),
    "zero-3 + fractions": Place(
        stage=3,
        placement={
            "parameters": {"device": 0.4, "nvme": 0.6},
            "gradients": {"device": 0.5, "host": 0.5},
            "optimizer": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        },
    ),
    "zero-2 + fractions": Place(stage=2, placement={"optimizer": {"device": 0.5, "nvme": 0.5}}),
    "zero-3 + gradients nvme": Place(
        stage=3, placement={"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
    ),
    "zero-2 + gradients nvme": Place(
        stage=2, placement={"gradients": {"device": 0.2, "host": 0.4, "nvme": 0.4}, "optimizer": "host"}
    ),
}

_TWICE = Run(with_masters=True, steps=3, clipping=0.5, accumulation=2)
TRAININGS = {
    "fp32": Run(with_masters=True, steps=4, clipping=0.5),
    "fp32, each micro-batch": _TWICE,
    "fp32, boundary": replace(_TWICE, schedule_of_reduction="boundary"),
    "fp32, no_sync": replace(_TWICE, schedule_of_reduction="no_sync"),
    "fp32, by value": replace(_TWICE, clipping=0.0, clipping_value=1e-3),
    "fp32, poisoned": replace(_TWICE, poisoned_step=1),
    "bf16": replace(_TWICE, precision="bf16"),
    "bf16, fp32 sums": replace(_TWICE, precision="bf16", sums_dtype="fp32"),
    "fp16": replace(_TWICE, precision="fp16", schedule_of_reduction="boundary"),
    "mixed": replace(_TWICE, model="adapters"),
    "mixed, fp32 sums": replace(_TWICE, model="adapters", sums_dtype="fp32"),
}


def run_of(training: str, name: str | None, world_size: int, address: str, job: str) -> Run:
    """Return the run of a training at the place `name`, as `job` of the store at `address`.

    Args:
        name: the place; None for the reference, which needs no store.
    """
    run = TRAININGS[training]
    if world_size > 1 and not training.startswith("fp32"):
        run = replace(run, clipping=0.0)
    if name is None:
        return replace(run, through_store=False)
    place = PLACES[name]
    return replace(
        run,
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "zero_optimization": {"stage": place.stage},
            "paramserver": {
                "address": address,
                "job": job,
                "placement": place.placement,
                "durability": place.durability,
            },
        },
    )
