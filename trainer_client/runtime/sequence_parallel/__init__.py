"""DeepSpeed's `deepspeed.runtime.sequence_parallel`, which is not built. Its names can be imported."""

from __future__ import annotations

from trainer_client.runtime.sequence_parallel import ulysses_sp

__all__ = ["ulysses_sp"]
