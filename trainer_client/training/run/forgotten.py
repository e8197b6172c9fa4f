"""The end of engines that a program has forgotten without closing them: a cell that is run again, a sweep, k folds.

When the garbage collector takes such an engine, its session with the store ends, its process groups go, and its share
of the daemon is given back, which ends the daemon if it was the last one. Nothing is committed, no rank waits for
another one, and the collector waits for nothing: it may run anywhere, also while a lock is held, so a thread of its own
does all this. This module owns that thread. It must never keep an engine or a model alive.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import weakref
from contextlib import ExitStack

from trainer_client.base import at_exit

log = logging.getLogger(__name__)

# The most seconds that the start of an engine, and the end of the process, wait for forgotten ones to end. A daemon
# that stops has as long to finish what it has begun.
_PATIENCE_SECONDS = 60.0


class _Undertaker:
    """The thread that ends what forgotten engines have left, one after the other."""

    def __init__(self) -> None:
        # The collector calls `bury` in any thread and at any moment, and a SimpleQueue allows that.
        self._left: queue.SimpleQueue[ExitStack | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The things that open engines would leave, if the program forgot them.
        self.of_open_engines: set[ExitStack] = set()

    def reset(self) -> None:
        """Begin anew in a forked child, which has no such thread, and must not end what its parent uses."""
        self._left, self._thread = queue.SimpleQueue(), None
        self.of_open_engines = set()

    def start(self) -> None:
        """Start the thread, unless it runs. The collector must not start one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paramserver-forgotten", daemon=True)
            self._thread.start()
            at_exit.register(self, _Undertaker.wait)

    def bury(self, pid: int, left: ExitStack) -> None:
        """Have the thread close what an engine of the process `pid` has left. It does not wait."""
        if pid == os.getpid():
            self.of_open_engines.discard(left)
            self._left.put(left)

    def wait(self) -> None:
        """Wait until all is closed that was left so far, at most for some time."""
        if self._thread is not None:
            reached = threading.Event()
            self._left.put(reached)
            reached.wait(_PATIENCE_SECONDS)

    def _run(self) -> None:
        while True:
            left = self._left.get()
            if isinstance(left, threading.Event):
                left.set()
                continue
            try:
                left.close()
            except Exception as error:
                # No caller waits for this error.
                log.warning("a forgotten engine has not ended well: %s", error)


_undertaker = _Undertaker()
os.register_at_fork(after_in_child=_undertaker.reset)


class Remains:
    """What an engine leaves if it is forgotten: the things that are closed then, which do not refer to the engine."""

    def __init__(self, engine: object, left: ExitStack) -> None:
        """Close `left` when the garbage collector has taken `engine`, unless `engine` was closed before."""
        _undertaker.start()
        _undertaker.of_open_engines.add(left)
        self._left = left
        self._finalizer = weakref.finalize(engine, _undertaker.bury, os.getpid(), left)
        # An engine that is there when the process exits is closed in a better way, see at_exit.py.
        self._finalizer.atexit = False

    def close_no_more(self) -> None:
        """Take note that the engine closes these things itself."""
        self._finalizer.detach()
        _undertaker.of_open_engines.discard(self._left)


def collect_forgotten() -> None:
    """End the engines that the program has forgotten, and wait until they have ended.

    Without this, an engine that is part of a cycle of references stays until Python looks for such cycles, and keeps
    memory of the store from the next engine.
    """
    for _ in range(2 if _undertaker.of_open_engines else 0):
        # The first call frees the graph of a loss whose backward pass has not come, by which torch holds the engine.
        gc.collect()
    _undertaker.wait()
