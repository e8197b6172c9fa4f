"""Two ranks whose gradients are summed by the accelerator's collectives, NCCL's on CUDA, beside one rank and the CPU.

The ranks share a device if the machine has one only; see tests/gpu/ranks.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.device.training import assert_close
from tests.gpu.accelerator import NEEDS_ACCELERATOR, kind
from tests.gpu.test_stages import config_of
from tests.integration.support import training
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import Result, Run, assert_bit_equal, store_config

pytestmark = NEEDS_ACCELERATOR

RUN = Run(steps=4, clipping=0.5, schedule=True)


def launch(runs: Sequence[Run], directory: Path) -> list[Result]:
    """Make the runs on two ranks, and return rank 0's results."""
    plan, result = directory / "runs.json", directory / "results.pt"
    plan.write_text(json.dumps([asdict(replace(run, device=kind())) for run in runs]))
    run_ranks("tests.gpu.ranks", 2, "train", plan, result)
    return [Result(**content) for content in torch.load(result)]


def test_two_ranks_equal_ddp_on_the_cpu_to_rounding(tmp_path: Path) -> None:
    """Stages 1 to 3, with states on the device, in host memory and on NVMe, and with accumulation."""
    runs = {
        "stage 1": replace(RUN, config=config_of(tmp_path / "1", 1)),
        "stage 2, host": replace(RUN, config=config_of(tmp_path / "2", 2, "cpu")),
        "stage 3, nvme": replace(RUN, config=store_config(tmp_path / "3", "nvme")),
        "accumulation": replace(RUN, steps=2, accumulation=3, config=store_config(tmp_path / "a", "cpu")),
    }
    plain = {name: replace(run, through_store=False, config={}) for name, run in runs.items()}
    expected = dict(zip(plain, training.launch(list(plain.values()), 2, tmp_path), strict=True))
    found = dict(zip(runs, launch(list(runs.values()), tmp_path), strict=True))
    for name, result in found.items():
        assert_close(result, expected[name])


def test_two_ranks_have_the_same_bits_twice(tmp_path: Path) -> None:
    """Models whose experts depend on the data are in it, because there collectives may lose their order."""
    runs = [
        replace(RUN, steps=3, clipping=0.0, model=model, config=store_config(tmp_path / f"{model}-{turn}", "nvme"))
        for model in ("gpt2", "conditional", "experts")
        for turn in range(2)
    ]
    results = launch(runs, tmp_path)
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert_bit_equal(second, first)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_two_hundred_steps_of_two_ranks_end(place: str, tmp_path: Path) -> None:
    """A wrong order of two communicators hangs in some runs only, so this one makes many small collectives."""
    config = store_config(tmp_path / "state", {"host": "cpu", "nvme": "nvme"}[place])
    (result,) = launch([replace(RUN, steps=200, schedule=False, config=config)], tmp_path)
    assert result.losses[-1] < result.losses[0]
