"""The warm-up with which three of DeepSpeed's schedules begin."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from trainer_client.schedules.schedule import require_positive

WarmupType: TypeAlias = Literal["log", "linear"]


class Warmup:
    """The warm-up of a schedule: a ratio that rises from 0 to 1 over the first steps, by which the rate rises.

    Attributes:
        steps: the number of steps, which is at least 2.

    Args:
        steps: the number of steps. 0 and 1 count as 2, as in DeepSpeed before 0.19.6. That release refuses 0, which
            Accelerate's users and older versions of transformers write for a run without a warm-up.
        kind: whether the increase is logarithmic or linear.

    Raises:
        ValueError: the number of steps is no integer of at least 0, or there is no increase of that kind.
    """

    def __init__(self, steps: int, kind: str) -> None:
        if steps != 0 or isinstance(steps, bool):
            require_positive("warmup_num_steps", steps)
        if kind not in get_args(WarmupType):
            raise ValueError(f"warmup_type = {kind!r} is unknown: write 'log' or 'linear'")
        self.steps = max(2, steps)
        self._is_linear = kind == "linear"

    def ratio(self, iteration: int) -> float:
        """Return the fraction of the increase (0 to 1) that is reached at an iteration of the warm-up."""
        if self._is_linear:
            return iteration / self.steps
        # The logarithm is multiplied by the reciprocal, as in DeepSpeed, because a division would round differently.
        return (1.0 / math.log(self.steps)) * math.log(iteration + 1)
