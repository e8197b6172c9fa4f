"""DeepSpeed's tensor parallelism in training (AutoTP), which is not built."""

from __future__ import annotations

from typing import Any, NoReturn

from trainer_client.not_built import refuse

__all__ = ["tp_model_init"]


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **_: Any) -> NoReturn:
    """Refuse to divide a model's layers among ranks. It raises NotBuiltError."""
    refuse(
        "tp_model_init",
        "tensor parallelism is not built; stage 3 with offload_param trains a model that is larger than a device, so "
        "leave the call and the section tensor_parallel out",
    )
