"""DeepSpeed's `deepspeed.compression`: its helpers for modules by name. Compression itself is not built."""

from __future__ import annotations

from trainer_client.compression import compress, helper

__all__ = ["compress", "helper"]
