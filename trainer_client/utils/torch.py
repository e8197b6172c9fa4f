"""DeepSpeed's question for the version of torch, which scripts ask before they use a newer function of torch."""

from __future__ import annotations

import torch

__all__ = ["required_torch_version"]


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Return whether the version of torch is at least `min_version` and at most `max_version`, where given.

    Raises:
        ValueError: neither limit is given.
    """
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version(): give min_version or max_version")
    is_late = min_version is None or torch.__version__ >= str(min_version)
    is_early = max_version is None or torch.__version__ <= str(max_version)
    return is_late and is_early
