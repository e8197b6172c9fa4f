"""DeepSpeed's name of the section `zero_optimization` reads older keys, and those of stage 3 without their prefix."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trainer_client.config.zero import OffloadOptimizerSection, OffloadParamSection
from trainer_client.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum


def test_older_names_are_read() -> None:
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
