"""LRRangeTest: a rate that rises without end, to find the largest one that trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt
from torch.optim import Optimizer

from trainer_client.schedules.schedule import (
    DeepSpeedSection,
    ParamsSection,
    PerGroup,
    Schedule,
    ScheduleRecord,
    Values,
    require_positive,
    spread,
)


class LRRangeTest(Schedule):
    """DeepSpeed's LRRangeTest: the rate is a multiple of its minimum that rises on a line or in stairs.

    This is the range test of Smith, arXiv:1803.09820.

    Attributes:
        min_lr: the minimum of each parameter group.

    Args:
        optimizer: the optimizer whose rates are set.
        lr_range_test_min_lr: the minimum, for all parameter groups or for each.
        lr_range_test_step_size: the number of steps in an interval.
        lr_range_test_step_rate: the part of the minimum by which the rate rises in an interval.
        lr_range_test_staircase: whether the rate rises once an interval instead of every step.
        last_batch_iteration: see Schedule.

    Raises:
        ValueError: an argument is out of its range, or has values for another number of groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        require_positive("lr_range_test_step_size", lr_range_test_step_size)
        self.min_lr = spread(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, iteration: int) -> list[float]:
        steps = iteration + 1
        intervals = steps // self.step_size if self.staircase else steps / self.step_size
        return [low * (1 + self.step_rate * intervals) for low in self.min_lr]


class LRRangeTestParams(ParamsSection):
    """Parameters of LRRangeTest, with DeepSpeed's defaults."""

    lr_range_test_min_lr: Values = Field(
        default=1e-3, description="Rate at the start; a list has one for each parameter group."
    )
    lr_range_test_step_size: PositiveInt = Field(default=2000, description="Optimizer steps in an interval.")
    lr_range_test_step_rate: float = Field(
        default=1.0, description="Part of the rate at the start by which the rate rises in an interval."
    )
    lr_range_test_staircase: bool = Field(default=False, description="Rise once an interval, not every step.")


class LRRangeTestSection(DeepSpeedSection):
    """The config's section `scheduler` if its `type` is "LRRangeTest"."""

    type: Literal["LRRangeTest"] = Field(description="the schedule")
    params: LRRangeTestParams = LRRangeTestParams()


LR_RANGE_TEST = ScheduleRecord(schedule_class=LRRangeTest, section=LRRangeTestSection)
