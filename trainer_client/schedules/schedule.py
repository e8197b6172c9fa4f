"""The base of DeepSpeed's learning-rate schedules, and the record of a schedule that the config can name.

This module owns the iteration of a schedule, and how it is stored and restored. It must change no key of a parameter
group except the rate; OneCycle changes the betas, too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer_client.base.section import Section

# A parameter of a schedule: one value for all parameter groups, or one value for each of them.
PerGroup: TypeAlias = float | Sequence[float]


class Schedule(LRScheduler):
    """A learning-rate schedule of DeepSpeed in the form of a scheduler of torch.

    The rates follow from the iteration, which is the number of the last step of the schedule. DeepSpeed's iteration,
    `last_batch_iteration`, is -1 at the first step of the optimizer, 0 at the second, and so on. torch's `last_epoch`
    is always one more.

    A state has the iteration and not the parameters of the schedule. So after a resume the schedule has the parameters
    of the new run, as in DeepSpeed. The state also has the keys in which torch's own schedulers keep their iteration.

    Args:
        optimizer: the optimizer whose rates are set.
        last_batch_iteration: the iteration from which the schedule goes on; -1: the schedule begins. A schedule that
            goes on does not change the optimizer's rates before the next step.
    """

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        if last_batch_iteration >= 0:
            # torch requires the entry "initial_lr" in each parameter group if a schedule goes on. DeepSpeed's schedules
            # never make this entry, so it is made here.
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", float(group["lr"]))
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """DeepSpeed's iteration: the number of the last step of the schedule, from 0 on; -1 before the first step."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the present iteration, one for each parameter group."""
        if self._keeps_groups:
            return [float(group["lr"]) for group in self.optimizer.param_groups]
        return list(self._rates(self.last_batch_iteration))

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next iteration; or, as in DeepSpeed, those of the iteration `epoch`."""
        if epoch is not None:
            self.last_epoch = epoch
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration, under the names that DeepSpeed and torch have for it."""
        return {
            "last_batch_iteration": self.last_batch_iteration,
            "last_epoch": self.last_epoch,
            "_step_count": self.last_epoch + 1,
            "_last_lr": self.get_last_lr(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the iteration of a state of this class, of DeepSpeed's schedules or of a scheduler of torch."""
        if "last_batch_iteration" in state_dict:
            self.last_epoch = state_dict["last_batch_iteration"] + 1
        else:
            self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        self._last_lr = state_dict.get("_last_lr") or self.get_lr()

    @property
    def _keeps_groups(self) -> bool:
        """Whether the schedule leaves the rates in the parameter groups as they are.

        It does if it was made with an iteration from which it goes on, and has made no step yet.
        """
        return self._step_count == 1 and self.last_epoch > 0

    @abstractmethod
    def _rates(self, iteration: int) -> list[float]:
        """Return the rate of each parameter group at an iteration. The first iteration is -1."""


def spread(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    """Return the values of an argument, one for each parameter group. A single value holds for all groups.

    Raise ValueError if the number of values differs from that of the groups.
    """
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(
            f"{name} has {len(value)} values, and the optimizer has {count} parameter groups: write one value for each "
            "group, or a number"
        )
    return [float(each) for each in value]


def require_positive(name: str, value: Any) -> None:
    """Raise ValueError if `value`, given for the argument `name`, is not a positive integer."""
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} = {value!r} is refused: write a positive integer")


def _parse_values(value: Any) -> float | tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    try:
        numbers = tuple(float(each) for each in values)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(0.0 <= number < float("inf") for number in numbers):
        raise ValueError("write a number that is not negative, or a list with one for each parameter group")
    return numbers if isinstance(value, list | tuple) else numbers[0]


def _parse_steps(value: Any) -> int | str:
    if value == "auto":
        return "auto"
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value != int(value) or value < 1:
        raise ValueError("write a positive number of optimizer steps")
    return int(value)


def _parse_warmup_steps(value: Any) -> int | str:
    return 0 if value == 0 and not isinstance(value, bool) else _parse_steps(value)


# The types of a schedule's parameters in the config. All but `Values` also accept "auto", which Accelerate and
# transformers replace.
Values = Annotated[float | tuple[float, ...], PlainValidator(_parse_values)]
ZeroOrValues = Annotated[Values, BeforeValidator(lambda value: 0.0 if value == "auto" else value)]
OptimizersOrValues = Annotated[Values | None, BeforeValidator(lambda value: None if value == "auto" else value)]
# A number of optimizer steps. It may be "auto" as long as no schedule is made of it, because Hugging Face's tools often
# pass a schedule of their own beside a config with "auto".
StepCount = Annotated[int | str, PlainValidator(_parse_steps)]
# A number of steps of a warm-up, which may also be 0: see Warmup.
WarmupStepCount = Annotated[int | str, PlainValidator(_parse_warmup_steps)]


class ScheduleSection(Section):
    """The config's section `scheduler`. Its key `type` says which schedule it is."""

    type: str

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the schedule's class, without the optimizer."""


class ParamsSection(Section):
    """The parameters of a schedule of DeepSpeed: the config's section `scheduler.params`."""

    last_batch_iteration: Annotated[int, Field(ge=-1)] = Field(
        default=-1,
        description="Iteration from which a new job goes on; -1: it begins. A job that is resumed has its own.",
    )


class DeepSpeedSection(ScheduleSection):
    """The config's section `scheduler` for a schedule of DeepSpeed. Each schedule has its own subclass."""

    params: ParamsSection

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the schedule's class, without the optimizer."""
        return self.params.model_dump()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """A schedule that the config can name: its class, and the class of the section `scheduler` that names it.

    registry.py makes the schedule of a config with the record of its name.
    """

    schedule_class: type[LRScheduler]
    section: type[ScheduleSection]

    @property
    def name(self) -> str:
        """The name of the schedule in the config and in messages."""
        return self.schedule_class.__name__
