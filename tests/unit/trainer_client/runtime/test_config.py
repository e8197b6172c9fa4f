"""`DeepSpeedConfig` has the values that scripts read from a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer_client import DeepSpeedConfig, DeepSpeedConfigError, NotBuiltError

CONFIG: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}


def test_sizes_that_are_left_out_follow_from_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))

    for source in (CONFIG, path):
        config = DeepSpeedConfig(source)
        assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (24, 4)
        assert config.gradient_accumulation_steps == 2
        assert (config.zero_enabled, config.zero_optimization_stage, config.gradient_clipping) == (True, 2, 1.0)
        assert (config.bfloat16_enabled, config.float16_enabled) == (True, False)


def test_a_config_that_contradicts_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size = 24"):
        DeepSpeedConfig(CONFIG)
    with pytest.raises(NotBuiltError, match="mesh_device"):
        DeepSpeedConfig(CONFIG, mesh_device=object())
