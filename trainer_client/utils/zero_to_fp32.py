"""DeepSpeed's conversion of its checkpoints to fp32 weights. The store exports weights instead."""

from __future__ import annotations

from typing import Any, NoReturn

from trainer_client.not_built import refuse

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

_REMEDY = (
    "the weights are in the store, not in files of ranks: run `paramserver export` for a file that torch or Hugging "
    "Face loads, or call engine.full_state_dict()"
)


def get_fp32_state_dict_from_zero_checkpoint(*_: Any, **__: Any) -> NoReturn:
    """Refuse the call. Raises NotBuiltError."""
    refuse("get_fp32_state_dict_from_zero_checkpoint()", _REMEDY)


def convert_zero_checkpoint_to_fp32_state_dict(*_: Any, **__: Any) -> NoReturn:
    """Refuse the call. Raises NotBuiltError."""
    refuse("convert_zero_checkpoint_to_fp32_state_dict()", _REMEDY)


def load_state_dict_from_zero_checkpoint(*_: Any, **__: Any) -> NoReturn:
    """Refuse the call. Raises NotBuiltError."""
    refuse("load_state_dict_from_zero_checkpoint()", _REMEDY)
