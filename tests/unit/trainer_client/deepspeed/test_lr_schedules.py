"""The constants of DeepSpeed's module of schedules are the names that the schedules here know."""

from __future__ import annotations

import inspect

from trainer_client.deepspeed import lr_schedules


def test_the_constants_are_the_names_of_schedules_and_of_their_parameters() -> None:
    schedules = [getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES]
    known = {name for schedule in schedules for name in inspect.signature(schedule).parameters}
    known |= {schedule.__name__ for schedule in schedules} | {"lr_schedule", "log", "linear"}

    constants = {name: value for name, value in vars(lr_schedules).items() if name.isupper() and isinstance(value, str)}

    assert len(constants) == 30
    assert {name: value for name, value in constants.items() if value not in known} == {}
