"""DeepSpeed's sections `bf16` and `fp16` of a config, for scripts that read or check them by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_client.config.precision import Bf16Section, Fp16Section

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"]

DeepSpeedBF16Config = Bf16Section
DeepSpeedFP16Config = Fp16Section


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Section:
    """Return the section `bf16` of a config, or `bfloat16`, its older name; with defaults if the config has none.

    Raises:
        pydantic.ValidationError: a value is not possible.
    """
    return Bf16Section(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> Fp16Section:
    """Return the section `fp16` of a config; with defaults if the config has none.

    Raises:
        pydantic.ValidationError: a value is not possible.
    """
    return Fp16Section(**(param_dict.get("fp16") or {}))
