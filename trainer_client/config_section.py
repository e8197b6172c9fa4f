"""What all sections of the training config have in common: unknown keys are refused, and nothing changes later."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
