"""Runs on an accelerator that go on from a committed step: the bits of a run that was not interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.accelerator import NEEDS_ACCELERATOR, kind
from tests.gpu.test_stages import config_of
from tests.integration.support.training import Run, assert_bit_equal, store_config, train_through_store

pytestmark = [*NEEDS_ACCELERATOR, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("place", ["device", "cpu", "nvme"])
def test_dropout_goes_on_from_the_random_state_of_the_device(place: str, tmp_path: Path) -> None:
    def run_in(directory: Path) -> Run:
        config = config_of(directory, 2) if place == "device" else store_config(directory, place)
        return Run(steps=6, dropout=0.1, clipping=0.5, schedule=True, device=kind(), config=config)

    whole = train_through_store(run_in(tmp_path / "whole"))
    first = train_through_store(replace(run_in(tmp_path / "parts"), steps=3))
    second = train_through_store(run_in(tmp_path / "parts"))
    assert second.resumed_step == 3
    together = replace(second, losses=first.losses + second.losses, norms=first.norms + second.norms)
    assert_bit_equal(together, whole)
