"""DeepSpeed's `deepspeed.checkpoint`: the helpers and the name that programs import from it."""

from __future__ import annotations

from trainer_client.checkpoint import ds_to_universal, utils

__all__ = ["UNIVERSAL_CHECKPOINT_INFO", "ds_to_universal", "utils"]

# The key of a client state under which frameworks describe how DeepSpeed is to merge tensors that they have split. It
# is stored and returned as any other key, because no tensor is split here.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
