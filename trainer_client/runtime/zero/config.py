"""DeepSpeed's section `zero_optimization` of a config, for scripts that read or check one by themselves."""

from __future__ import annotations

import enum
from typing import Any, Self

from pydantic import model_validator

from trainer_client.config.older_names import with_todays_names
from trainer_client.config.zero import OffloadOptimizerSection, OffloadParamSection, ZeroSection

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "ZeroStageEnum",
]

_SECTION = "zero_optimization"


class ZeroStageEnum(enum.IntEnum):
    """The stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig(ZeroSection):
    """The section with DeepSpeed's names of its values.

    It is made of the keys of the section, older names included. The keys of stage 3 are attributes with and without
    their prefix `stage3_`. As with DeepSpeed, `overlap_comm` is true at stage 3 if the config leaves it out.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is not possible.
    """

    @model_validator(mode="before")
    @classmethod
    def _take_older_names(cls, given: Any) -> Any:
        return with_todays_names({_SECTION: given})[_SECTION] if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _choose_overlap(self) -> Self:
        if self.overlap_comm is None:
            object.__setattr__(self, "overlap_comm", self.stage == 3)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return the value of a key of stage 3 by its name without the prefix."""
        key = f"stage3_{name}"
        if key in type(self).model_fields:
            return getattr(self, key)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


DeepSpeedZeroOffloadParamConfig = OffloadParamSection
DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerSection
