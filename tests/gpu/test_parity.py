"""Parity runs on a CUDA device. They are skipped on a machine without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.support.training import Run, assert_bit_equal, store_config, train_through_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

RUN = Run(steps=10, clipping=0.5, schedule=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placements_equal_each_other_bit_for_bit_and_the_loss_falls(tmp_path: Path, precision: str) -> None:
    bf16 = {"bf16": {"enabled": precision == "bf16"}}
    nvme = train_through_store(replace(RUN, config=store_config(tmp_path / "nvme", "nvme") | bf16))
    host = train_through_store(replace(RUN, config=store_config(tmp_path / "host", "cpu") | bf16))

    assert_bit_equal(nvme, host)
    assert nvme.losses[-1] < nvme.losses[0]
