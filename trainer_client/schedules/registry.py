"""The schedules that the config's section `scheduler` can name, and the reasons why it cannot name others.

To add a schedule, add a module with its class and its record to this folder, and an entry to the tuple below.
"""

from __future__ import annotations

import difflib
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer_client.errors import ConfigError
from trainer_client.schedules.lr_range_test import LR_RANGE_TEST
from trainer_client.schedules.one_cycle import ONE_CYCLE
from trainer_client.schedules.schedule import ScheduleSection
from trainer_client.schedules.torch_schedules import REFUSED_TORCH_SCHEDULES, TORCH_SCHEDULES
from trainer_client.schedules.warmup_cosine_lr import WARMUP_COSINE_LR
from trainer_client.schedules.warmup_decay_lr import WARMUP_DECAY_LR
from trainer_client.schedules.warmup_lr import WARMUP_LR

_OF_DEEPSPEED = (
    WARMUP_LR,
    WARMUP_DECAY_LR,
    WARMUP_COSINE_LR,
    ONE_CYCLE,
    LR_RANGE_TEST,
)
# DeepSpeed's schedules come before torch's, because DeepSpeed itself looks for a name among its own schedules first.
SCHEDULES = {record.name: record for record in (*_OF_DEEPSPEED, *TORCH_SCHEDULES)}

# The type of the config's section `scheduler`: the section of any of these schedules. The section's key `type` says
# which schedule it is.
if TYPE_CHECKING:
    AnyScheduleSection: TypeAlias = ScheduleSection
else:
    AnyScheduleSection = reduce(or_, dict.fromkeys(record.section for record in SCHEDULES.values()))


def make_schedule(section: ScheduleSection, optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler of the config, made for `optimizer`.

    Raises:
        ConfigError: the class refuses the parameters, or a number of steps is "auto".
    """
    arguments = section.arguments()
    if unknown := [f"scheduler.params.{name}" for name, value in arguments.items() if value == "auto"]:
        raise ConfigError(
            f'{", ".join(unknown)} is "auto": write the number of optimizer steps, which the library does not know, or '
            "pass initialize(lr_scheduler=...); transformers' Trainer and Accelerate write it"
        )
    try:
        return SCHEDULES[section.type].schedule_class(optimizer, **arguments)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"scheduler.params is refused by {section.type}: {error}") from None


def why_schedule_refused(name: str) -> str:
    """Return a sentence that tells a user why the config cannot name a schedule that is not in SCHEDULES."""
    if reason := REFUSED_TORCH_SCHEDULES.get(name):
        return f"{name} {reason}"
    near = difflib.get_close_matches(name, SCHEDULES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(SCHEDULES)}"
    return f"{name} is neither a schedule of DeepSpeed nor a class of torch.optim.lr_scheduler; {hint}"
