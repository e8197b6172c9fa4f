"""DeepSpeed's expert parallelism, which is not built. The names can be imported, for scripts that test for them."""

from __future__ import annotations

from trainer_client.moe import layer, utils

__all__ = ["layer", "utils"]
