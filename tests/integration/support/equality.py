"""Tensors by name that are equal, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


def are_equal(one: Tensors, other: Tensors) -> bool:
    """Return whether both have the same names, and equal tensors."""
    return one.keys() == other.keys() and not _different(one, other)


def assert_equal(found: Tensors, expected: Tensors) -> None:
    """Assert that both have the same names, and equal tensors. A failure shows the names that differ."""
    assert found.keys() == expected.keys()
    assert _different(found, expected) == []


def _different(one: Tensors, other: Tensors) -> list[str]:
    return [name for name, value in one.items() if not torch.equal(value, other[name])]
