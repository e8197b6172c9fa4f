"""What a rank holds of a model that is eight times as large as the store's host memory, while it is built, filled and
trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.integration.support.memory_ranks import HOST_BUDGET, MIB, MODEL_UNITS, UNIT_BYTES, WIDTH
from tests.integration.support.ranks import run_ranks

# Beyond units: activations of two samples, what the heap keeps, gRPC's and torch's buffers. Measured, with the units:
# 9 to 26 MB; the model is 96 MiB.
OVERHEAD_BYTES = 40 * MIB


@pytest.mark.parametrize("world_size", [1, 2], ids=["recipes", "files"])
def test_no_rank_holds_more_than_the_root_two_units_and_one_units_gradients(tmp_path: Path, world_size: int) -> None:
    assert MODEL_UNITS * UNIT_BYTES == 8 * HOST_BUDGET
    if world_size > 1:
        names = ["first.weight", *(f"blocks.{index}.linear.weight" for index in range(MODEL_UNITS - 1))]
        save_file({name: torch.randn(WIDTH, WIDTH) / WIDTH for name in names}, tmp_path / "model.safetensors")

    run_ranks("tests.integration.support.memory_ranks", world_size, tmp_path)

    unit_bytes = UNIT_BYTES // (1 if world_size == 1 else 2)  # two ranks compute in bf16
    for rank in range(world_size):
        counts = json.loads((tmp_path / f"counts-{rank}.json").read_text())
        # The root, the unit in use, the next one at most; the gradient of one.
        assert 2 * unit_bytes <= counts["parameters"] <= 4 * unit_bytes + 4096
        assert counts["initialised"] <= OVERHEAD_BYTES
        assert counts["peak"] <= OVERHEAD_BYTES
