"""DeepSpeed's `deepspeed.runtime`: the modules of it that scripts import, each with the names that scripts use.

The modules have DeepSpeed's names, so that `from deepspeed.runtime.X import Y` needs no other change than the package.
What they name is in the rooms below. Nothing of this library imports this room but the faces above it.
"""

from __future__ import annotations

from trainer_client.runtime import (
    activation_checkpointing,
    base_optimizer,
    config,
    dataloader,
    engine,
    lr_schedules,
    sequence_parallel,
    tensor_parallel,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "sequence_parallel",
    "tensor_parallel",
    "utils",
    "zero",
]
