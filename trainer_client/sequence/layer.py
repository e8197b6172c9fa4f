"""DeepSpeed's attention over ranks that have parts of a sequence."""

from __future__ import annotations

from trainer_client.not_built import NotBuilt

__all__ = ["DistributedAttention"]


class DistributedAttention(
    NotBuilt,
    remedy="sequence parallelism (Ulysses) is not built; call the attention itself, with whole sequences on each rank",
):
    """DeepSpeed's attention over ranks."""
