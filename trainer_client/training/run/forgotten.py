"""The end of engines that a program has forgotten without closing them: a cell that is run again, a sweep, k folds.

When the garbage collector takes such an engine, its session with the store ends, its process groups are destroyed, and
its share of the daemon is given back. If it was the last share, the daemon ends. Nothing is committed, and no rank
waits for another one. The garbage collector may run anywhere, also while a lock is held, so it must not wait, and a
thread of this module does all this work. This module owns that thread. It must never keep an engine or a model alive.
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

# The most seconds that the start of an engine, and the end of the process, wait for forgotten engines to end. The
# daemon of a forgotten engine may take this long to finish the work that it has begun.
_PATIENCE_SECONDS = 60.0


class _Undertaker:
    """The thread that ends forgotten engines, one after the other, by closing the exit stacks that they have left."""

    def __init__(self) -> None:
        # The garbage collector may call `bury` in any thread and at any moment, also while that thread is in a method
        # of the queue. SimpleQueue allows such a call, and Queue does not.
        self._left: queue.SimpleQueue[ExitStack | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The exit stacks of the open engines. If the program forgets an engine, the thread closes the engine's exit
        # stack.
        self.of_open_engines: set[ExitStack] = set()

    def reset(self) -> None:
        """Forget the parent's thread and engines in a forked child, which must not end engines of its parent."""
        self._left, self._thread = queue.SimpleQueue(), None
        self.of_open_engines = set()

    def start(self) -> None:
        """Start the thread that ends forgotten engines, unless it runs already.

        Each engine calls this when it is made, because `bury` runs in the garbage collector, which must not start
        threads.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paramserver-forgotten", daemon=True)
            self._thread.start()
            at_exit.register(self, _Undertaker.wait)

    def bury(self, pid: int, left: ExitStack) -> None:
        """Have the thread close the exit stack of a forgotten engine of the process `pid`. This call does not wait."""
        if pid == os.getpid():
            self.of_open_engines.discard(left)
            self._left.put(left)

    def wait(self) -> None:
        """Wait until all engines that are forgotten so far have ended, at most for _PATIENCE_SECONDS."""
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
                # No caller waits for the thread that ends forgotten engines, so its error is only logged.
                log.warning("a forgotten engine has not ended well: %s", error)


_undertaker = _Undertaker()
os.register_at_fork(after_in_child=_undertaker.reset)


class Remains:
    """Has the exit stack of an engine closed if the program forgets the engine. It must not refer to the engine."""

    def __init__(self, engine: object, left: ExitStack) -> None:
        """Close `left` when the garbage collector has taken `engine`, unless `engine` was closed before."""
        _undertaker.start()
        _undertaker.of_open_engines.add(left)
        self._left = left
        self._finalizer = weakref.finalize(engine, _undertaker.bury, os.getpid(), left)
        # An engine that still exists when the process exits is closed by at_exit.py. So this finalizer does nothing at
        # exit.
        self._finalizer.atexit = False

    def close_no_more(self) -> None:
        """Leave the exit stack alone even if the program forgets the engine, because the engine closes it itself."""
        self._finalizer.detach()
        _undertaker.of_open_engines.discard(self._left)


def collect_forgotten() -> None:
    """End the engines that the program has forgotten, and wait until they have ended.

    Without this call, an engine that is part of a cycle of references stays until Python looks for such cycles, and its
    memory of the store is missing for the next engine.
    """
    for _ in range(2 if _undertaker.of_open_engines else 0):
        # Two collections are necessary. The first one frees the graph of a loss on which the script has called no
        # backward; torch holds the engine by that graph. The second collection frees the engine.
        gc.collect()
    _undertaker.wait()
