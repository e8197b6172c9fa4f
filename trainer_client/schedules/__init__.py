"""DeepSpeed's learning-rate schedules, and torch's schedulers that the config's section `scheduler` can name.

    from trainer_client.schedules import WarmupLR

Each schedule has a module with its class, its section of the config and its record; registry.py lists the records.
"""

from __future__ import annotations

from trainer_client.schedules.lr_range_test import LRRangeTest
from trainer_client.schedules.one_cycle import OneCycle
from trainer_client.schedules.warmup_cosine_lr import WarmupCosineLR
from trainer_client.schedules.warmup_decay_lr import WarmupDecayLR
from trainer_client.schedules.warmup_lr import WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
