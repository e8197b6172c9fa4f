"""DeepSpeed's `deepspeed.ops.aio`: the question whether offload to NVMe can be used."""

from __future__ import annotations

from trainer_client.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
