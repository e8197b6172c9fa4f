"""DeepSpeed's objects of a config have the values that scripts read, by older names and by those of stage 3, too."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trainer_client.config.precision import Fp16Section
from trainer_client.config.training_config import TrainingConfig
from trainer_client.config.zero import OffloadOptimizerSection, OffloadParamSection
from trainer_client.deepspeed.config import (
    DeepSpeedConfig,
    DeepSpeedZeroConfig,
    ZeroStageEnum,
    get_bfloat16_config,
    get_float16_config,
)
from trainer_client.errors import ConfigError, NotBuiltError

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
    with pytest.raises(ConfigError, match="train_batch_size = 24"):
        DeepSpeedConfig(CONFIG)
    with pytest.raises(NotBuiltError, match="mesh_device"):
        DeepSpeedConfig(CONFIG, mesh_device=object())


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, True, "abc", [], None])
def test_a_loss_scale_that_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"must be a number|greater than or equal to 0"):
        Fp16Section(loss_scale=value)


@pytest.mark.parametrize(("key", "value"), [("loss_scale_window", 0), ("min_loss_scale", -1), ("min_loss_scale", True)])
def test_what_a_dynamic_scale_cannot_use_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{key}|must be a number"):
        Fp16Section(enabled=True, **{key: value})


def test_a_static_scale_takes_any_window_as_with_deepspeed() -> None:
    section = {"enabled": True, "loss_scale": 128, "loss_scale_window": 0, "min_loss_scale": -1}

    assert TrainingConfig(fp16=section).fp16.loss_scale == 128  # type: ignore[arg-type]


def test_the_sections_of_a_config_are_read_by_both_names_of_bf16() -> None:
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert get_bfloat16_config({"bf16": {"enabled": True}}).enabled
    assert not get_bfloat16_config({}).enabled
    assert get_float16_config({"fp16": {"loss_scale": "3"}}).loss_scale == 3.0


def test_older_names_of_zero_are_read() -> None:
    config = DeepSpeedZeroConfig.model_validate(
        {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "stage3_gather_fp16_weights_on_model_save": True}
    )

    assert isinstance(config.offload_optimizer, OffloadOptimizerSection)
    assert isinstance(config.offload_param, OffloadParamSection)
    assert config.gather_16bit_weights_on_model_save is True
    assert ZeroStageEnum(config.stage) is ZeroStageEnum.weights


@pytest.mark.parametrize("stage", range(4))
def test_communication_overlaps_at_stage_3_unless_the_config_says_otherwise(stage: int) -> None:
    assert DeepSpeedZeroConfig.model_validate({"stage": stage}).overlap_comm is (stage == 3)
    assert DeepSpeedZeroConfig.model_validate({"stage": stage, "overlap_comm": False}).overlap_comm is False


def test_an_unknown_key_and_an_unknown_attribute_are_errors() -> None:
    with pytest.raises(ValidationError, match="no_such_key"):
        DeepSpeedZeroConfig.model_validate({"no_such_key": 1})
    with pytest.raises(AttributeError, match="no_such_key"):
        _ = DeepSpeedZeroConfig().no_such_key


@pytest.mark.parametrize(("read", "write"), [(False, False), (True, False), (False, True)])
def test_the_offload_says_whether_it_is_pipelined(read: bool, write: bool) -> None:
    section = OffloadOptimizerSection.model_validate({"pipeline_read": read, "pipeline_write": write})
    assert section.pipeline is (read or write)
