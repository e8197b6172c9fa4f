"""Trace spans: the engine reports each finished operation to its listeners.

Without a listener, tracing costs almost nothing.

This module owns no memory, because the listeners decide which spans they keep. It must never raise into the traced
operation.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from storage.base.shard import LAYOUT_SEPARATOR

ArgumentT = TypeVar("ArgumentT")


class Activity(enum.Enum):
    """The operations that are traced. The values are shown to people."""

    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    # The read of a slab into host memory for which a client waits.
    DEMAND_FETCH = "demand fetch"
    PREFETCH = "prefetch"
    # The whole update of a group, with its reads, kernels and writes.
    UPDATE = "update"
    # One call of an optimizer kernel, for one tile.
    OPTIMIZER = "optimizer"
    COMMIT = "commit"
    # The sync of all devices that a commit waits for.
    SYNC = "sync"
    # A read by the scrubber, which verifies committed bytes in the background.
    SCRUB = "scrub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A finished operation.

    Attributes:
        label: the job's identity, the group and the rest of the operation's subject, separated by slashes. For bytes of
            a slab it is Slab.label.
        began_seconds, ended_seconds: the values of time.monotonic() at its begin and its end.
        nbytes: the number of bytes that it moved; 0 if it moves none.
    """

    activity: Activity
    label: str
    began_seconds: float
    ended_seconds: float
    nbytes: int

    @property
    def job(self) -> str:
        """The identity of the job whose operation this was (`JobSpec.identity`)."""
        return self._parts[0]

    @property
    def subject(self) -> str:
        """The label without the job: the group, and the rest after it."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str]:
        """The identity of the job, and the subject. Names of jobs and of groups may have slashes."""
        name, separator, rest = self.label.partition(LAYOUT_SEPARATOR)
        if separator:
            layout, _, subject = rest.partition("/")
            return f"{name}{separator}{layout}", subject
        # Labels without a name of a layout belong to jobs of earlier versions. In these labels, the name of the group
        # is assumed to have no slash.
        job, *parts = self.label.rsplit("/", 2)
        return job, "/".join(parts)


class Tracer:
    """Passes each span of a store's operations to all listeners.

    Listeners are added and removed on one thread; any thread may report spans.
    """

    def __init__(self) -> None:
        # The functions that get each finished span are in a tuple, which is replaced as a whole when a function is
        # added or removed, because other threads may be iterating over it.
        self._listeners: tuple[Callable[[Span], None], ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether there is a listener. If there is none, operations are not traced."""
        return bool(self._listeners)

    def listen(self, listener: Callable[[Span], None]) -> None:
        """Call `listener` with each span that ends, on the thread that ended it. `listener` must not raise."""
        self._listeners = (*self._listeners, listener)

    def ignore(self, listener: Callable[[Span], None]) -> None:
        """Stop calling `listener`. A span that ends at the same moment on another thread may still reach it."""
        self._listeners = tuple(other for other in self._listeners if other != listener)

    @contextmanager
    def span(self, activity: Activity, label: str, nbytes: int = 0) -> Iterator[None]:
        """Report the body of the `with` block as a span to the listeners, when the body has ended."""
        if not self._listeners:
            yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            span = Span(
                activity=activity, label=label, began_seconds=began, ended_seconds=time.monotonic(), nbytes=nbytes
            )
            for listener in self._listeners:
                listener(span)

    def traced(self, activity: Activity, label: str, work: Callable[[ArgumentT], None]) -> Callable[[ArgumentT], None]:
        """Return a function that does `work` and reports each call as a span."""
        return functools.partial(self._run, activity, label, work) if self._listeners else work

    def _run(self, activity: Activity, label: str, work: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
        with self.span(activity, label):
            work(argument)
