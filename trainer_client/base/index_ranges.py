"""Runs of consecutive indexes as pairs, which keep lists of some hundred thousand parameters or many ranks short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def to_ranges(indexes: Iterable[int]) -> list[list[int]]:
    """Return the runs of consecutive indexes as [first, last], in the order of the indexes."""
    ranges: list[list[int]] = []
    for index in indexes:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ranges


def from_ranges(ranges: Iterable[Sequence[int]]) -> list[int]:
    """Return the indexes of which `to_ranges` made the ranges."""
    return [index for first, last in ranges for index in range(first, last + 1)]
