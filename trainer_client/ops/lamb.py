"""DeepSpeed's LAMB, which the store cannot run."""

from __future__ import annotations

from trainer_client.not_built import NotBuilt

__all__ = ["FusedLamb"]


class FusedLamb(
    NotBuilt,
    remedy="LAMB needs the norms of whole parameters, and a store updates ranges of parameters; use FusedAdam, or Lion "
    "for large batches",
):
    """DeepSpeed's LAMB."""
