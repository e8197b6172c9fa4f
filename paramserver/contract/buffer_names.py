"""The names under which a job stores the large buffers of its ranks' modules, beside the model's parameters.

A job has one entry for each rank, because ranks may have buffers with other values. These entries are no part of the
model's identity: with other buffers a job is laid out anew, and never refused as another model. This module owns the
form of these names.
"""

from __future__ import annotations

# Names of stored buffers begin with this text. It contains characters that no attribute of a module has in its name, so
# no parameter of a model has the name of a buffer.
_BEGIN = "(buffers of rank "


def name_buffers(rank: int) -> str:
    """Return the name of the entry that has the large buffers of a rank."""
    return f"{_BEGIN}{rank})"


def has_buffers(name: str) -> bool:
    """Return whether the entry of this name has the large buffers of a rank, and is no parameter of the model."""
    return name.startswith(_BEGIN)
