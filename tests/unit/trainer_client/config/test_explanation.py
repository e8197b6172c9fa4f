"""An error about a key says where the key belongs, or which key is meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer_client.config.explanation import TypedSection, explain
from trainer_client.config.training_config import TrainingConfig
from trainer_client.optimizers.registry import OPTIMIZERS, why_refused

CHOICES = {"optimizer": TypedSection(names=OPTIMIZERS, why_refused=why_refused)}


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (
            {"offload_param": {}},
            "offload_param is unknown to DeepSpeed and to this library; did you mean zero_optimization.offload_param?",
        ),
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, "optimizer.params.momentun is unknown"),
        ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, "optimizer.params.lr = -1 is refused"),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing: write one of AdamW, Adam, SGD, Lion, Adagrad"),
        ({"paramserver": {"trace": {}}}, "paramserver.trace.file is missing"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 is refused: write 0, 1, 2 or 3"),
        ({"pipeline": {"stages": 2}}, "pipeline is refused: the library has data parallelism only (ZeRO); set stages"),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}},
            "optimizer.params.learning_rate is unknown to DeepSpeed and to this library; did you mean lr?",
        ),
        (
            {"clip_grad_norm": 1.0},
            "clip_grad_norm is unknown to DeepSpeed and to this library; did you mean gradient_clipping?",
        ),
        (
            {"optimizer": "Adam"},
            'optimizer = \'Adam\' is refused: write a section, such as "optimizer": {"type": "Adam"}',
        ),
        ({"fp16": True}, 'fp16 = True is refused: write a section, such as "fp16": {"enabled": true}'),
        (
            {"paramserver": {"placement": "nvme"}},
            "paramserver.placement = 'nvme' is refused: write a section, such as "
            '"placement": {"parameters": "nvme", "optimizer": "nvme"}',
        ),
        (
            {"zero_optimization": {"offload_param": "cpu"}},
            "zero_optimization.offload_param = 'cpu' is refused: write a section, such as "
            '"offload_param": {"device": "cpu"}',
        ),
        (
            {"zero_optimization": 3},
            'zero_optimization = 3 is refused: write a section, such as "zero_optimization": {"stage": 0}',
        ),
        (
            {"paramserver": {"host_budget": "64 gigs"}},
            "paramserver.host_budget = '64 gigs' is refused: write a number of bytes, or a number with one of the "
            'units KiB, MiB, GiB, TiB, PiB (powers of 1024) and KB, MB, GB, TB, PB (powers of 1000), such as "1.5GiB"',
        ),
        ({"zero_optimization": {"offload_param": {"pinmemory": 1}}}, "zero_optimization.offload_param.pinmemory is"),
    ],
)
def test_a_line_begins_with_the_full_name_of_the_key(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainingConfig.model_validate(raw)

    assert explain(caught.value, TrainingConfig, CHOICES).startswith(line)
