"""Scripts of Accelerate run over the store, and give the losses that they give with Accelerate itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.support.ranks import run_ranks

# Two runs of five models on two ranks take minutes. test_accelerator.py compares one rank with Accelerate each time.
pytestmark = pytest.mark.peers

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directory in which two ranks of each library have run all examples."""
    found = {}
    for library in ("accelerate", "store"):
        found[library] = tmp_path_factory.mktemp(library)
        run_ranks("tests.integration.support.accelerated", WORLD_SIZE, library, found[library])
    return found


@pytest.fixture(scope="module")
def results(directories: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What the examples returned, by library."""
    return {library: json.loads((path / "results.json").read_text()) for library, path in directories.items()}


@pytest.mark.parametrize(
    ("what", "tolerance"),
    # Under autocast, a difference in the last bit of a weight may change the rounding of a bf16 value.
    [("smallest", 1e-5), ("nlp", 1e-5), ("accuracy", 0), ("vision", 1e-3), ("norms", 1e-3), ("lora", 1e-5)],
)
def test_two_ranks_have_the_losses_of_accelerate(
    results: dict[str, dict[str, Any]], what: str, tolerance: float
) -> None:
    assert results["store"][what] == pytest.approx(results["accelerate"][what], rel=tolerance)


@pytest.mark.parametrize("file", ["trained/model.safetensors", "adapters/adapter_model.safetensors"])
def test_the_saved_weights_have_the_names_and_values_of_accelerate(directories: dict[str, Path], file: str) -> None:
    ours, expected = (load_file(directories[library] / file) for library in ("store", "accelerate"))

    assert {name: value.shape for name, value in ours.items()} == {n: v.shape for n, v in expected.items()}
    for name, value in expected.items():
        difference = (ours[name].float() - value.float()).abs().max()
        assert difference < 1e-2, name
