"""The arithmetic of alignment."""

from __future__ import annotations


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
