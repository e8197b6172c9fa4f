"""What is closed when the process exits, the newest first, without being kept alive until then.

`atexit` keeps the objects whose methods it calls, so an engine that a program has forgotten would stay, with its memory
and its daemon, until the process ends. This module owns the order. It must never hold a strong reference to an owner,
and never call one in a forked child, which has copies of its parent's objects.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

OwnerT = TypeVar("OwnerT")

# The owners and what is called with each, the oldest first.
_registered: list[tuple[weakref.ref[Any], Callable[[Any], None]]] = []


def register(owner: OwnerT, act: Callable[[OwnerT], None]) -> None:
    """Have `act(owner)` called when this process exits, if the owner is still there then.

    A repeated call moves the owner to the end of the list, which is called first.
    """
    unregister(owner)
    _registered.append((weakref.ref(owner), act))
    # The handlers of atexit are called in reverse order of their registration, so this one comes before those that
    # other libraries have registered until now.
    atexit.unregister(_run)
    atexit.register(_run)


def unregister(owner: object) -> None:
    """Have nothing called for an owner any more. Idempotent. Owners that are gone are forgotten, too."""
    _registered[:] = [entry for entry in _registered if (known := entry[0]()) is not None and known is not owner]


def _run() -> None:
    with ExitStack() as acts:
        for reference, act in _registered:
            if (owner := reference()) is not None:
                acts.callback(act, owner)
        _registered.clear()


os.register_at_fork(after_in_child=_registered.clear)
