"""DeepSpeed's `deepspeed.runtime.activation_checkpointing`."""

from __future__ import annotations

from trainer_client.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
