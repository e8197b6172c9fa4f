"""DeepSpeed's name of the engine."""

from __future__ import annotations

from trainer_client.engine import Engine

__all__ = ["DeepSpeedEngine"]

DeepSpeedEngine = Engine
