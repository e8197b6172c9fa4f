"""DeepSpeed's `deepspeed.checkpoint`: the helper that programs import from it."""

from __future__ import annotations

from trainer_client.checkpoint import utils

__all__ = ["utils"]
