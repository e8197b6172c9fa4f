"""The names of `deepspeed.runtime.zero.partition_parameters` that scripts import; they are those of `zero`."""

from __future__ import annotations

from trainer_client.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]
