"""WarmupCosineLR: a warm-up to the optimizer's rate, then half a cosine down to a part of it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat
from torch.optim import Optimizer

from trainer_client.schedules.schedule import (
    DeepSpeedSection,
    ParamsSection,
    Schedule,
    ScheduleRecord,
    StepCount,
    WarmupStepCount,
)
from trainer_client.schedules.warmup import Warmup, WarmupType
from trainer_client.schedules.warmup_decay_lr import warn_of_short_run


class WarmupCosineLR(Schedule):
    """DeepSpeed's WarmupCosineLR: each group's own rate, times a ratio that rises to 1 and falls with a cosine.

    The first step of the optimizer has the rate 0, whatever the ratios are, and the second has `warmup_min_ratio`.

    Attributes:
        total_num_steps, warmup_min_ratio, cos_min_ratio, warmup_type: the arguments.
        warmup_num_steps: the argument, and at least 2.

    Args:
        optimizer: the optimizer whose rates are set.
        total_num_steps: the number of steps after which `cos_min_ratio` is reached; it stays there.
        warmup_min_ratio: the ratio at which the warm-up begins.
        warmup_num_steps: the number of steps after which the ratio is 1.
        cos_min_ratio: the ratio at the end.
        warmup_type: "log" or "linear".
        last_batch_iteration: see Schedule.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._warmup = Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = self._warmup.steps, warmup_type
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)
        warn_of_short_run(total_num_steps, self._warmup.steps)

    def get_lr_ratio(self) -> float:
        """Return the ratio of this iteration, by which the rates of all groups are multiplied."""
        return self._ratio(self.last_batch_iteration)

    def _rates(self, iteration: int) -> list[float]:
        ratio = self._ratio(iteration)
        return [float(rate) * ratio for rate in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        warmup_steps = self._warmup.steps
        if iteration < warmup_steps:
            return self.warmup_min_ratio + self._warmup.ratio(iteration) * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (iteration + 1 - warmup_steps) / max(1, self.total_num_steps - warmup_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)


class WarmupCosineLRParams(ParamsSection):
    """Parameters of WarmupCosineLR, with DeepSpeed's defaults."""

    total_num_steps: StepCount = Field(description="Optimizer steps of the whole run.")
    warmup_min_ratio: NonNegativeFloat = Field(default=0.0, description="Part of the optimizer's rate at the start.")
    warmup_num_steps: WarmupStepCount = Field(default=1000, description="Optimizer steps of the warm-up.")
    cos_min_ratio: NonNegativeFloat = Field(default=0.0001, description="Part of the optimizer's rate at the end.")
    warmup_type: WarmupType = Field(default="log", description="How the rate rises: `log` or `linear`.")


class WarmupCosineLRSection(DeepSpeedSection):
    """The config's section `scheduler` if its `type` is "WarmupCosineLR"."""

    type: Literal["WarmupCosineLR"] = Field(description="the schedule")
    params: WarmupCosineLRParams


WARMUP_COSINE_LR = ScheduleRecord(schedule_class=WarmupCosineLR, section=WarmupCosineLRSection)
