"""The names of shard groups in the store: the only place that builds and parses them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroupName:
    """The name that a shard group has in the store: it names a part of a unit, or a part of a tensor.

        str(ShardGroupName(unit="blocks.0", start=0, stop=64, variant=":frozen")) == "blocks.0[0:64]:frozen"
        ShardGroupName.unit_of("blocks.0[0:64]:frozen") == "blocks.0"

    Attributes:
        unit: name of the unit, or FQN of the tensor.
        start, stop: the part's range, in elements of the unit's flat buffer or of the flattened tensor.
        variant: tells groups of one unit apart that have the same range; begins with ":".
    """

    unit: str
    start: int
    stop: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.unit}[{self.start}:{self.stop}]{self.variant}"

    @staticmethod
    def unit_of(name: str) -> str:
        """Return the name of the unit in the name of a shard group; "" if that name has no range in brackets."""
        return name.rpartition("[")[0]
