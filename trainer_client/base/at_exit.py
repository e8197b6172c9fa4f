"""The list of owners that are closed when the process exits, the newest first. It holds them by weak references.

`atexit` keeps the objects whose methods it calls alive. So an engine that a program no longer uses would stay until the
process ends, with its memory and its daemon. This module owns the order of closing. It must never hold a strong
reference to an owner, and never call an owner in a forked child, which has copies of its parent's objects.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

OwnerT = TypeVar("OwnerT")

# The objects that were registered and the function that is called with each when the process exits, the oldest object
# first.
_registered: list[tuple[weakref.ref[Any], Callable[[Any], None]]] = []


def register(owner: OwnerT, act: Callable[[OwnerT], None]) -> None:
    """Have `act(owner)` called when this process exits, if the owner is still there then.

    A repeated call moves the owner to the end of the list. At exit, the last owner of the list is called first.
    """
    unregister(owner)
    _registered.append((weakref.ref(owner), act))
    # atexit calls its handlers in reverse order of registration. So `_run` is registered anew here, to run before the
    # handlers that other libraries have registered until now.
    atexit.unregister(_run)
    atexit.register(_run)


def unregister(owner: object) -> None:
    """Remove `owner` from the list, so that it is not closed at exit. Idempotent.

    Entries of owners that were garbage-collected are removed, too.
    """
    _registered[:] = [entry for entry in _registered if (known := entry[0]()) is not None and known is not owner]


def _run() -> None:
    with ExitStack() as acts:
        for reference, act in _registered:
            if (owner := reference()) is not None:
                acts.callback(act, owner)
        _registered.clear()


os.register_at_fork(after_in_child=_registered.clear)
