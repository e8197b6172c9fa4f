"""Models of transformers that are loaded, and changed, while a stage-3 config is active, beside plain PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/integration/support/pretrained_script.py"
FINETUNING = ROOT / "tests/integration/support/finetuning_script.py"
NUMBERED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


def test_trainers_tune_a_pretrained_model_in_a_process_that_no_launcher_has_started(tmp_path: Path) -> None:
    """As with DeepSpeed they have a process group of one rank, without which a Trainer fails at its first log.

    A second Trainer begins anew beside the first one's engine, and a third one resumes; nothing closes an engine.
    """
    environment = {name: value for name, value in os.environ.items() if name not in NUMBERED}
    results = []
    started = []
    for name, module, state in (
        ("ours", ["-m", "trainer_client.as_deepspeed"], [str(tmp_path / "state")]),
        ("plain", [], []),
    ):
        (tmp_path / name).mkdir()
        results.append(tmp_path / name / "losses.json")
        command = [sys.executable, *module, str(FINETUNING), str(tmp_path / name), str(results[-1]), *state]
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    ended = [(process.communicate(timeout=300)[0], process.returncode) for process in started]

    assert [status for _, status in ended] == [0, 0], "\n".join(output[-3000:] for output, _ in ended)
    ours, plain = (json.loads(result.read_text()) for result in results)
    assert [len(losses) for losses in ours] == [3, 3, 3]
    assert ours[0] == ours[1]
    assert ours == plain
