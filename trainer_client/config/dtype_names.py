"""The names of dtypes in the config. DeepSpeed has several for each dtype, and the config keeps the shortest name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
_SHORT = {name: short for short, names in _NAMES.items() for name in names}


def short_name(value: Any) -> Any:
    """Return the shortest of the names that DeepSpeed has for a dtype, and any other value as it is."""
    return _SHORT.get(value.lower(), value) if isinstance(value, str) else value


DTypeName = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(short_name)]
