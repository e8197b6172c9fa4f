"""The standing of a config key: whether the library honours it, accepts it without effect, or refuses it.

A key without one of these marks in its annotation is honoured. This module must never read a config: the sections carry
the marks, and config/without_effect.py and config/reference.py read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

REFUSED_ERROR = "refused_key"


def is_off(value: Any) -> bool:
    """Return whether the value of a key leaves the feature that the key is for switched off.

    A section is off if its `enabled` is false, or, if it has no `enabled`, if none of its own sections is on.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        if "enabled" in value:
            return not value["enabled"]
        return all(is_off(inner) for inner in value.values() if isinstance(inner, Mapping))
    return not value or value == "none"


def is_absent(value: Any) -> bool:
    """Return whether a key has no value. Use this for a section that is on as soon as it is in the config."""
    return value is None or value is False or value == {}


def is_at_most_one(value: Any) -> bool:
    """Return whether a number of ranks, stages or parts is missing or at most 1, so that nothing is divided."""
    return value is None or (isinstance(value, int | float) and value <= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutEffect:
    """The mark of a key that is accepted and changes nothing.

    Results are the same with the key, or the key would only round them more, as states in bf16 do.

    Attributes:
        why: why the key has no effect here, as a clause without a full stop. Keys with one reason share its text.
    """

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The mark of a key that is refused unless its value means that the feature is off.

    Attributes:
        why: why this library cannot honour the key, as a clause without a full stop.
        instead: what the user can write instead, as an imperative clause.
        unless: whether a value means that the feature is off.
    """

    why: str
    instead: str
    unless: Callable[[Any], bool] = is_off

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the field, which checks the value's type first and then that it is not refused.

        pydantic calls this.
        """
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if not self.unless(value):
            raise PydanticCustomError(REFUSED_ERROR, "{reason}", {"reason": f"{self.why}; {self.instead}"})
        return value
