"""DeepSpeed's `deepspeed.runtime.base_optimizer`: the class by which libraries know the engine's optimizer."""

from __future__ import annotations

from trainer_client.store_optimizer import StoreOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer"]
