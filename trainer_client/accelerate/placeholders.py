"""Accelerate's DummyOptim and DummyScheduler, which stand for the optimizer and the schedule of the config.

This module replaces "auto" in the config by the values of these placeholders. It must never make an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from trainer_client.config.automatic import AUTO
from trainer_client.errors import ConfigError


def check_places(config: Mapping[str, Any], optimizer: Any, scheduler: Any) -> None:
    """Check that the config and the script do not both define an optimizer or both a schedule.

    It is also an error if the script has a placeholder, and the config lacks the section for which the placeholder
    stands.

    Raises:
        ConfigError: the message says what to remove.
    """
    for section, given, placeholder in (
        ("optimizer", optimizer, DummyOptim),
        ("scheduler", scheduler, DummyScheduler),
    ):
        stands_in = isinstance(given, placeholder)
        if section in config and not stands_in and (given is not None or section == "scheduler"):
            raise ConfigError(
                f"the config has the section {section!r}, and prepare() was not given accelerate.utils."
                f"{placeholder.__name__} for it: remove the section, or prepare that in the place of the script's own"
            )
        if stands_in and section not in config and getattr(given, "lr_scheduler_callable", None) is None:
            raise ConfigError(
                f"prepare() got a {placeholder.__name__}, which stands for the section {section!r} of the config, and "
                "there is none: write the section, or make the object of torch in the script"
            )


def fill(config: dict[str, Any], optimizer: Any, scheduler: Any, world_size: int) -> None:
    """Replace "auto" in the sections `optimizer` and `scheduler` by the placeholders' values, as Accelerate does.

    Args:
        world_size: the number by which the steps of the schedule are divided, because Accelerate counts the batches of
            all processes.
    """
    if isinstance(optimizer, DummyOptim):
        _fill(config, "optimizer", {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay})
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None:
        values: dict[str, Any] = {
            "warmup_min_lr": 0,
            "warmup_max_lr": getattr(scheduler.optimizer, "lr", None),
            "warmup_num_steps": max(1, scheduler.warmup_num_steps),
        }
        if scheduler.total_num_steps is not None:
            values["total_num_steps"] = math.ceil(scheduler.total_num_steps / world_size)
        _fill(config, "scheduler", values)


def _fill(config: dict[str, Any], section: str, values: Mapping[str, Any]) -> None:
    params = config[section].get("params", {})
    known = {key: values[key] for key, value in params.items() if value == AUTO and values.get(key) is not None}
    config[section] = {**config[section], "params": {**params, **known}}
