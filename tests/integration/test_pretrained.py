"""Models of transformers that are loaded, and changed, while a stage-3 config is active, beside plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/integration/support/pretrained_script.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the script has found for each way to a model, in one process that no launcher has started."""
    directory = tmp_path_factory.mktemp("pretrained")
    result = directory / "result.json"
    command = [sys.executable, "-m", "trainer_client.as_deepspeed", str(SCRIPT), str(directory), str(result)]
    ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    ways: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return ways


@pytest.mark.parametrize("way", ["one file", "shards", "a config", "resized", "resized to the mean"])
def test_a_model_that_is_loaded_at_stage_3_trains_as_plain(found: dict[str, dict[str, Any]], way: str) -> None:
    ours, plain = found[way]["losses"]

    assert found[way]["values"]
    assert ours == plain
