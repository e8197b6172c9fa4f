"""The names of shard groups in the store: of which unit a group is, and which part of the unit's flat buffer it has.

A name says which elements a group has and never whose they are, so that another rank can take them over.
"""

from __future__ import annotations


def group_name(unit: str, start: int, stop: int, *, trainable: bool, suffix: str) -> str:
    """Return the name of the group with the elements `[start, stop)` of a unit's flat buffer.

    Args:
        trainable: whether the group has optimizer states.
        suffix: tells groups of one unit apart that differ in dtype.

    Example:
        >>> group_name("layers.3", 0, 4096, trainable=False, suffix=":bfloat16")
        "layers.3[0:4096]:frozen:bfloat16"
    """
    return f"{unit}[{start}:{stop}]" + ("" if trainable else ":frozen") + suffix


def unit_of(name: str) -> str:
    """Return the unit in the name of a group."""
    return name.rpartition("[")[0]
