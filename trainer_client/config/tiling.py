"""The section `paramserver.tiling`: layers that are too large to be gathered as a whole."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from paramserver.contract.sizes import Size
from trainer_client.base.section import Section

# The smallest size of a tile that the config may set. A tile of fewer bytes would cost more requests than it saves
# memory.
LEAST_TILE_BYTES = 4096


class TilingSection(Section):
    """Which parameters are cut into tiles, and how much of the logits there is at once; see training/model/tile.py."""

    largest_tile: Annotated[Size, Field(ge=LEAST_TILE_BYTES)] | Literal["auto"] | None = Field(
        default=None,
        description='`"tiling": "64MiB"` for short: a weight of a `Linear`, an `Embedding` or a `Conv1D` that has more '
        "bytes in the dtype of the forward is gathered in tiles of at most so many; `auto`: 1/32 of the smallest "
        "`host_budget` of the run's daemons; null: every unit is gathered as a whole: "
        "[large models](large-models.md#layers-larger-than-memory)",
    )
    exclude: tuple[str, ...] = Field(
        default=(), description="patterns of names: parameters that stay whole, because the model uses them by itself"
    )
    loss_tokens: PositiveInt | None = Field(
        default=None,
        description="of how many tokens a causal language model of transformers has logits at once while it trains; "
        "null: of all: [large models](large-models.md#the-loss-of-a-large-vocabulary)",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, value: Any) -> Any:
        return {"largest_tile": value} if isinstance(value, str | int) else value
