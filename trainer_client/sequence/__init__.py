"""DeepSpeed's sequence parallelism, which is not built. The names can be imported, for scripts that test for them."""

from __future__ import annotations

from trainer_client.sequence import layer

__all__ = ["layer"]
