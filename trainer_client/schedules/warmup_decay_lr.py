"""WarmupDecayLR: a warm-up, then a linear decay to 0."""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import Field
from torch.optim import Optimizer

from trainer_client.schedules.schedule import DeepSpeedSection, OptimizersOrValues, PerGroup, ScheduleRecord, StepCount
from trainer_client.schedules.warmup_lr import WarmupLR, WarmupLRParams

log = logging.getLogger(__name__)


class WarmupDecayLR(WarmupLR):
    """DeepSpeed's WarmupDecayLR: after the warm-up, the rate falls on a line to the minimum.

    Args:
        optimizer: the optimizer whose rates are set.
        total_num_steps: the number of steps after which the minimum is reached; it stays there.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: see WarmupLR. Here the
            maximum has a default of its own.

    Raises:
        ValueError: an argument is out of its range, or has values for another number of groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        warn_of_short_run(total_num_steps, self._warmup.steps)

    def _factor(self, iteration: int) -> float:
        if iteration < self._warmup.steps:
            return self._warmup.ratio(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self._warmup.steps))


def warn_of_short_run(total_steps: int, warmup_steps: int) -> None:
    """Log a warning if a schedule's warm-up has more steps than the whole run, so that it never ends."""
    if total_steps < warmup_steps:
        log.warning(
            "total_num_steps %d is less than warmup_num_steps %d: the run ends within its warm-up",
            *(total_steps, warmup_steps),
        )


class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of WarmupDecayLR, with DeepSpeed's defaults."""

    total_num_steps: StepCount = Field(description="Optimizer steps of the whole run.")
    warmup_max_lr: OptimizersOrValues = Field(
        default=0.001,
        description='Rate after the warm-up; a list has one for each parameter group. null, "auto": the optimizer\'s.',
    )


class WarmupDecayLRSection(DeepSpeedSection):
    """The config's section `scheduler` if its `type` is "WarmupDecayLR"."""

    type: Literal["WarmupDecayLR"] = Field(description="the schedule")
    params: WarmupDecayLRParams


WARMUP_DECAY_LR = ScheduleRecord(schedule_class=WarmupDecayLR, section=WarmupDecayLRSection)
