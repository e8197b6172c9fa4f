"""Trace spans: the engine reports each finished operation to one listener. Without a listener it costs almost nothing.

Owns no memory, because the listener decides which spans it keeps. Must never raise into the traced operation.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

ArgumentT = TypeVar("ArgumentT")


class Activity(enum.Enum):
    """The operations that are traced. The values are shown to people."""

    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    # A read of a slab for which a client waits.
    DEMAND_FETCH = "demand fetch"
    PREFETCH = "prefetch"
    # The whole update of a group, with its reads, kernels and writes.
    UPDATE = "update"
    # One call of an optimizer kernel, for one tile.
    OPTIMIZER = "optimizer"
    COMMIT = "commit"
    # The sync of all devices within a commit.
    SYNC = "sync"


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
        """The identity of the job."""
        return self.label.rsplit("/", 2)[0]

    @property
    def subject(self) -> str:
        """The label without the job: the group, and the rest after it."""
        return "/".join(self.label.rsplit("/", 2)[1:])


class Tracer:
    """The tracer of a store.

    Attributes:
        listener: the function that is called with each span when it has ended, on any thread; None: tracing is off.
    """

    def __init__(self) -> None:
        self.listener: Callable[[Span], None] | None = None

    @contextmanager
    def span(self, activity: Activity, label: str, nbytes: int = 0) -> Iterator[None]:
        """Trace an operation that lasts as long as the context."""
        if self.listener is None:
            yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            # The attribute is read again, because the listener may have been removed meanwhile.
            if (listener := self.listener) is not None:
                ended = time.monotonic()
                listener(Span(activity=activity, label=label, began_seconds=began, ended_seconds=ended, nbytes=nbytes))

    def traced(self, activity: Activity, label: str, work: Callable[[ArgumentT], None]) -> Callable[[ArgumentT], None]:
        """Return a function that does `work` and reports each call as a span."""
        return work if self.listener is None else functools.partial(self._run, activity, label, work)

    def _run(self, activity: Activity, label: str, work: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
        with self.span(activity, label):
            work(argument)
