"""OneCycle: a rate that rises and falls once while the momentum falls and rises, then a decay."""

from __future__ import annotations

import logging
import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch.optim import Optimizer

from trainer_client.schedules.schedule import (
    DeepSpeedSection,
    ParamsSection,
    PerGroup,
    Schedule,
    ScheduleRecord,
    Values,
    spread,
)

log = logging.getLogger(__name__)

# The second beta that DeepSpeed's OneCycle sets whenever it sets the first one.
_SECOND_BETA = 0.99


class OneCycle(Schedule):
    """DeepSpeed's OneCycle: the policy of Smith, arXiv:1803.09820, for the rate and for the first beta.

    The rate rises from its minimum to its maximum and falls back, and then decays from its minimum. The first beta
    does the reverse, and decays from its maximum. As in DeepSpeed, the second beta becomes 0.99, and the first step of
    the optimizer has the minimum of the first beta, although the cycle begins at the maximum.

    An optimizer without betas (SGD) keeps its momentum, and a warning says so.

    Attributes:
        min_lrs, max_lrs: the minimum and the maximum of each parameter group's rate.
        cycle_momentum: whether the first beta is cycled.
        step_ratio: the part of the cycle's steps in which the rate rises.

    Args:
        optimizer: the optimizer whose rates and betas are set.
        cycle_min_lr, cycle_max_lr: the bounds of the rate, for all parameter groups or for each.
        decay_lr_rate: how fast the rate decays: n intervals after the cycle, it is divided by 1 + n * decay_lr_rate.
        cycle_first_step_size: the number of steps in which the rate rises.
        cycle_second_step_size: the number of steps in which the rate falls; None: the same number.
        cycle_first_stair_count: the number of stairs in which the rate rises; 0: it rises every step.
        cycle_second_stair_count: the number of stairs in which the rate falls; None: the same number.
        decay_step_size: the number of steps in an interval of the decay; 0: there is no decay.
        cycle_momentum: whether to cycle the first beta, too.
        cycle_min_mom, cycle_max_mom: the bounds of the first beta, for all parameter groups or for each.
        decay_mom_rate: how fast the first beta rises in the decay: it is multiplied by 1 + n * decay_mom_rate.
        last_batch_iteration: see Schedule.

    Raises:
        ValueError: an argument is out of its range, or has values for another number of groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._cycle = _Cycle(
            cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count
        )
        self.step_ratio = self._cycle.peak
        self.min_lrs = spread(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = spread(optimizer, "cycle_max_lr", cycle_max_lr)
        self._min_betas = spread(optimizer, "cycle_min_mom", cycle_min_mom)
        self._max_betas = spread(optimizer, "cycle_max_mom", cycle_max_mom)
        self._decay_step_size = decay_step_size
        self._decay_lr_rate = decay_lr_rate
        self._decay_mom_rate = decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            log.warning("OneCycle: %s has no betas, so its momentum is not cycled", type(optimizer).__name__)
        super().__init__(optimizer, last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Go on by one iteration, or to the iteration `epoch` (see Schedule), and set the betas as well."""
        super().step(epoch)
        if not self.cycle_momentum or self._keeps_groups:
            return
        betas = self._min_betas if self.last_batch_iteration < 0 else self._betas(self.last_batch_iteration)
        for group, beta in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = (beta, _SECOND_BETA)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of this iteration, one pair for each parameter group; None if they are not cycled."""
        if not self.cycle_momentum:
            return None
        return [(beta, _SECOND_BETA) for beta in self._betas(self.last_batch_iteration)]

    def _rates(self, iteration: int) -> list[float]:
        if iteration < self._cycle.length:
            height = self._cycle.height(iteration + 1)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        divisor = 1 + self._decay_lr_rate * self._intervals(iteration)
        return [low / divisor for low in self.min_lrs]

    def _betas(self, iteration: int) -> list[float]:
        if iteration < self._cycle.length:
            height = self._cycle.height(iteration + 1)
            return [high - (high - low) * height for low, high in zip(self._min_betas, self._max_betas, strict=True)]
        factor = 1 + self._decay_mom_rate * self._intervals(iteration)
        return [high * factor for high in self._max_betas]

    def _intervals(self, iteration: int) -> float:
        """Return how many intervals of the decay have passed at an iteration after the cycle; 0 without a decay."""
        return (iteration - self._cycle.length + 1) / self._decay_step_size if self._decay_step_size else 0.0


class _Cycle:
    """The shape of a cycle: a height that rises from 0 to 1 and falls back to 0, by which the rate is set.

    Attributes:
        length: the number of steps of both halves.
        peak: the part of these steps in which the height rises.
    """

    def __init__(
        self, first_steps: float, second_steps: float | None, first_stairs: int, second_stairs: int | None
    ) -> None:
        second_steps = first_steps if second_steps is None else second_steps
        if first_steps <= 0:
            raise ValueError(f"cycle_first_step_size = {first_steps} is refused: write a positive number")
        if second_steps < 0:
            raise ValueError(f"cycle_second_step_size = {second_steps} is refused: write a number that is not negative")
        self.length = float(first_steps + second_steps)
        self.peak = first_steps / self.length
        self._first_steps = first_steps
        self._second_steps = second_steps
        self._first_stairs = first_stairs
        self._second_stairs = first_stairs if second_stairs is None else second_stairs

    def height(self, steps: int) -> float:
        """Return the height of the cycle, 0 to 1, after `steps` of its steps, which are at most `length`."""
        peak = self.peak
        # Adding 1 rounds the fraction of the cycle to the same bits as in DeepSpeed.
        fraction = (1.0 + steps / self.length) % 1.0
        rises = fraction <= peak
        stairs = self._first_stairs if rises else self._second_stairs
        if stairs <= 0:
            return fraction / peak if rises else (fraction - 1) / (peak - 1)
        # The stair is computed from the number of steps and not from the fraction of the cycle, because the fraction at
        # the peak may be rounded to below 1.
        within = steps % self.length
        if within <= self._first_steps:
            return math.floor(within * stairs / self._first_steps) / stairs
        return math.floor((self.length - within) * stairs / self._second_steps) / stairs


class OneCycleParams(ParamsSection):
    """Parameters of OneCycle, with DeepSpeed's defaults."""

    cycle_min_lr: Values = Field(description="Lowest rate of the cycle; a list has one for each parameter group.")
    cycle_max_lr: Values = Field(description="Highest rate of the cycle; a list has one for each parameter group.")
    decay_lr_rate: NonNegativeFloat = Field(
        default=0.0, description="After the cycle: the rate is divided by 1 + this, times the intervals since."
    )
    cycle_first_step_size: PositiveInt = Field(default=2000, description="Optimizer steps in which the rate rises.")
    cycle_second_step_size: NonNegativeInt | None = Field(
        default=None, description="Optimizer steps in which the rate falls; null: as many."
    )
    cycle_first_stair_count: int = Field(default=0, description="Stairs in which the rate rises; 0: every step.")
    cycle_second_stair_count: int | None = Field(
        default=None, description="Stairs in which the rate falls; null: as many."
    )
    decay_step_size: NonNegativeInt = Field(
        default=0, description="Optimizer steps in an interval of the decay; 0: no decay."
    )
    cycle_momentum: bool = Field(default=True, description="Cycle the first beta against the rate.")
    cycle_min_mom: Values = Field(default=0.8, description="Lowest first beta; a list has one for each group.")
    cycle_max_mom: Values = Field(default=0.9, description="Highest first beta; a list has one for each group.")
    decay_mom_rate: float = Field(
        default=0.0, description="After the cycle: the first beta is multiplied by 1 + this, times the intervals since."
    )


class OneCycleSection(DeepSpeedSection):
    """The config's section `scheduler` if its `type` is "OneCycle"."""

    type: Literal["OneCycle"] = Field(description="the schedule")
    params: OneCycleParams


ONE_CYCLE = ScheduleRecord(schedule_class=OneCycle, section=OneCycleSection)
