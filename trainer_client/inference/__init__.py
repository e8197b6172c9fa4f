"""Inference with weights from the store: DeepSpeed's names for it, and the modules that implement them."""

from __future__ import annotations

from trainer_client.inference.engine import InferenceEngine
from trainer_client.inference.faces import init_inference

__all__ = ["InferenceEngine", "init_inference"]
