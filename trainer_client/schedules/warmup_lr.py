"""WarmupLR: a warm-up, then a constant rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch.optim import Optimizer

from trainer_client.schedules.schedule import (
    DeepSpeedSection,
    OptimizersOrValues,
    ParamsSection,
    PerGroup,
    Schedule,
    ScheduleRecord,
    WarmupStepCount,
    ZeroOrValues,
    spread,
)
from trainer_client.schedules.warmup import Warmup, WarmupType


class WarmupLR(Schedule):
    """DeepSpeed's WarmupLR: the rate rises from a minimum to a maximum, and stays there.

    The first two steps of the optimizer have the minimum.

    Attributes:
        min_lrs, max_lrs: the minimum and the maximum of each parameter group.
        warmup_num_steps, warmup_type: the arguments; the number of steps is at least 2.

    Args:
        optimizer: the optimizer whose rates are set.
        warmup_min_lr: the minimum, for all parameter groups or for each.
        warmup_max_lr: the maximum, for all parameter groups or for each; None: the rate that each group has now.
        warmup_num_steps: the number of steps after which the maximum is reached.
        warmup_type: "log" or "linear".
        last_batch_iteration: see Schedule.

    Raises:
        ValueError: an argument is out of its range, or has values for another number of groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._warmup = Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self._warmup.steps, warmup_type
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = spread(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = spread(optimizer, "warmup_max_lr", warmup_max_lr)
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, iteration: int) -> list[float]:
        factor = 0.0 if iteration < 0 else self._factor(iteration)
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _factor(self, iteration: int) -> float:
        """Return the fraction of the way from the minimum to the maximum that the rate has gone, 0 to 1."""
        return self._warmup.ratio(iteration) if iteration < self._warmup.steps else 1.0


class WarmupLRParams(ParamsSection):
    """Parameters of WarmupLR, with DeepSpeed's defaults."""

    warmup_min_lr: ZeroOrValues = Field(
        default=0.0, description='Rate at the start; a list has one for each parameter group. "auto": 0.'
    )
    warmup_max_lr: OptimizersOrValues = Field(
        default=None,
        description='Rate after the warm-up; a list has one for each parameter group. null, "auto": the optimizer\'s.',
    )
    warmup_num_steps: WarmupStepCount = Field(default=1000, description="Optimizer steps of the warm-up.")
    warmup_type: WarmupType = Field(default="log", description="How the rate rises: `log` or `linear`.")


class WarmupLRSection(DeepSpeedSection):
    """The config's section `scheduler` if its `type` is "WarmupLR"."""

    type: Literal["WarmupLR"] = Field(description="the schedule")
    params: WarmupLRParams = WarmupLRParams()


WARMUP_LR = ScheduleRecord(schedule_class=WarmupLR, section=WarmupLRSection)
