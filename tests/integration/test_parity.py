"""Training through the store computes what plain PyTorch computes: bit for bit at world size 1, in every placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.support.model_runs import config_of
from tests.integration.support.training import (
    Result,
    Run,
    assert_bit_equal,
    launch,
    train_plain,
    train_through_store,
)

RUNS = {
    "plain": Run(),
    "clipped": Run(dropout=0.1, clipping=0.5),
    "all": Run(steps=15, dropout=0.1, clipping=0.5, accumulation=2, schedule=True, two_groups=True),
}


@pytest.fixture(scope="module")
def plain_results() -> dict[str, Result]:
    return {name: train_plain(run) for name, run in RUNS.items()}


@pytest.mark.parametrize("device", ["nvme", "cpu"])
@pytest.mark.parametrize("name", RUNS)
def test_world_1_equals_plain_pytorch_bit_for_bit(
    model_store: str, job: str, plain_results: dict[str, Result], name: str, device: str
) -> None:
    run = replace(RUNS[name], config=config_of(model_store, job, device))

    result = train_through_store(run)

    assert result.plane == "arena"
    assert_bit_equal(result, plain_results[name])


def test_streams_carry_the_same_bits_as_the_arena(model_store: str, job: str, plain_results: dict[str, Result]) -> None:
    run = replace(RUNS["clipped"], config=config_of(model_store, job, "nvme"), prefer_streams=True)

    result = train_through_store(run)

    assert result.plane == "streams"
    assert_bit_equal(result, plain_results["clipped"])


def test_world_2_equals_ddp_to_rounding_and_placements_equal_each_other(
    model_store: str, job: str, tmp_path: Path
) -> None:
    run = Run(steps=10, clipping=0.5, accumulation=2, schedule=True, two_groups=True)
    placed = [replace(run, config=config_of(model_store, f"{job}-{device}", device)) for device in ("nvme", "cpu")]

    ddp, nvme, host = launch([replace(run, through_store=False), *placed], 2, tmp_path)

    assert_bit_equal(nvme, host)
    torch.testing.assert_close(nvme.losses, ddp.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(nvme.norms, ddp.norms, rtol=1e-3, atol=1e-5)
    # Where both moments are near 0, AdamW amplifies a rounding difference to the size of a step.
    torch.testing.assert_close(nvme.weights, ddp.weights, rtol=1e-3, atol=2e-3)
