"""The section `paramserver.checkpoints`: which checkpoints are kept, and which are removed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from trainer_client.base.section import Section


class CheckpointsSection(Section):
    """The retention of checkpoints that `save_checkpoint` has made of this job.

    A checkpoint is kept if one of the three numbers keeps it; the newest one is always kept. If none is set, all are.
    """

    keep_last: PositiveInt | None = Field(default=None, description="how many of the newest checkpoints stay")
    keep_every: PositiveInt | None = Field(
        default=None, description="checkpoints at global steps that are multiples of this stay"
    )
    keep_best: PositiveInt | None = Field(
        default=None, description="how many stay that have the best `save_checkpoint(..., metric=)`"
    )
    best: Literal["min", "max"] = Field(default="min", description="whether the lowest or the highest metric is best")
