"""DeepSpeed's inference engine, which is not built. The names can be imported, for scripts that test for them."""

from __future__ import annotations

from typing import Any, NoReturn

from trainer_client.not_built import NotBuilt, refuse

__all__ = ["InferenceEngine", "init_inference"]

_REMEDY = "call the model itself, or engine.module within torch.inference_mode()"


class InferenceEngine(NotBuilt, remedy=_REMEDY):
    """DeepSpeed's engine for inference."""


def init_inference(*_: Any, **__: Any) -> NoReturn:
    """Refuse the call. Raises NotBuiltError."""
    refuse("init_inference()", _REMEDY)
