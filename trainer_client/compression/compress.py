"""DeepSpeed's compression of models (quantization, pruning, fewer layers), which is not built."""

from __future__ import annotations

from typing import Any, NoReturn

from trainer_client.not_built import refuse

__all__ = ["init_compression", "redundancy_clean"]

_REMEDY = (
    "compression is not built; leave the call and the section compression_training out, or compress the model with "
)
_REMEDY += "torch.nn.utils.prune or torchao before initialize()"


def init_compression(model: Any, deepspeed_config: Any, teacher_model: Any = None, mpu: Any = None) -> NoReturn:
    """Refuse to compress a model. It raises NotBuiltError."""
    refuse("init_compression", _REMEDY)


def redundancy_clean(model: Any, deepspeed_config: Any, mpu: Any = None) -> NoReturn:
    """Refuse to clean a compressed model up. It raises NotBuiltError."""
    refuse("redundancy_clean", _REMEDY)
