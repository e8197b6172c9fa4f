"""DeepSpeed's layer of experts."""

from __future__ import annotations

from trainer_client.not_built import NotBuilt

__all__ = ["MoE"]


class MoE(
    NotBuilt,
    remedy="expert parallelism is not built; write the experts as an nn.ModuleList: each is a unit, which only the "
    "ranks that use it gather (docs/models.md)",
):
    """DeepSpeed's layer of experts."""
