"""The engine to which a parameter belongs, for functions that are given a parameter and no engine.

This module owns the mark on each parameter. It must never keep an engine alive: the mark is a weak reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from trainer_client.training.model.parameters import ModelParameter

_OWNER = "paramserver_owner"


def own(parameters: Iterable[ModelParameter], owner: object) -> None:
    """Have `owner_of` return `owner` for these parameters, as long as `owner` is not garbage-collected."""
    for parameter in parameters:
        setattr(parameter.tensor, _OWNER, weakref.ref(owner))


def disown(parameters: Iterable[ModelParameter]) -> None:
    """Have `owner_of` return None for these parameters."""
    for parameter in parameters:
        delattr(parameter.tensor, _OWNER)


def is_owned(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has an owner, also if the owner was garbage-collected meanwhile."""
    return hasattr(parameter, _OWNER)


def owner_of(parameter: torch.Tensor) -> object | None:
    """Return the owner of a parameter, or None if it has none or the owner was garbage-collected."""
    reference = getattr(parameter, _OWNER, None)
    return reference() if reference is not None else None
