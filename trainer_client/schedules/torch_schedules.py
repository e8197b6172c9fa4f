"""The schedulers of torch that the config can name, and the reasons why it cannot name the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import Field, JsonValue
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from trainer_client.schedules.schedule import ScheduleRecord, ScheduleSection

_OF_FUNCTIONS = "is made of functions, which a config does not have: pass initialize(lr_scheduler=...)"
_OF_SCHEDULERS = "is made of other schedulers, which a config does not have: pass initialize(lr_scheduler=...)"
REFUSED_TORCH_SCHEDULES = {
    "LambdaLR": _OF_FUNCTIONS,
    "MultiplicativeLR": _OF_FUNCTIONS,
    "SequentialLR": _OF_SCHEDULERS,
    "ChainedScheduler": _OF_SCHEDULERS,
    "ReduceLROnPlateau": "steps on a metric, which the engine does not have: make it yourself, and call step(metric)",
}

_CLASSES: dict[str, type[LRScheduler]] = {
    name: value
    for name, value in vars(lr_scheduler).items()
    if isinstance(value, type)
    and issubclass(value, LRScheduler)
    and value is not LRScheduler
    and not name.startswith("_")
    and name not in REFUSED_TORCH_SCHEDULES
}

if TYPE_CHECKING:
    _Name: TypeAlias = str
else:
    _Name = Literal[tuple(_CLASSES)]


class TorchSection(ScheduleSection):
    """The config's section `scheduler` if its `type` is a class of torch.optim.lr_scheduler."""

    type: _Name = Field(description="the schedule")
    params: dict[str, JsonValue] = Field(default={}, description="of a class of torch: its arguments")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments with which to make the scheduler's class, without the optimizer."""
        return dict(self.params)


TORCH_SCHEDULES = tuple(ScheduleRecord(schedule_class=value, section=TorchSection) for value in _CLASSES.values())
