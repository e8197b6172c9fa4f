"""The names under which a job has the large buffers of its ranks, beside the parameters of the model.

A job has one entry for each rank, because ranks may have buffers with other values. These entries are no part of the
model's identity: with other buffers a job is laid out anew, and never refused as another model. This module owns the
form of these names.
"""

from __future__ import annotations

# A module's attribute has no such name, so no parameter has.
_BEGIN = "(buffers of rank "


def name_buffers(rank: int) -> str:
    """Return the name of the entry that has the large buffers of a rank."""
    return f"{_BEGIN}{rank})"


def has_buffers(name: str) -> bool:
    """Return whether the entry of this name has the large buffers of a rank, and is no parameter of the model."""
    return name.startswith(_BEGIN)
