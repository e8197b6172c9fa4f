"""DeepSpeed's `deepspeed.runtime.zero`, which is `trainer_client.zero`."""

from __future__ import annotations

from trainer_client.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    TiledLinear,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
