"""Tells whoever listens what the engine has done and when; by default nobody does, and it costs next to nothing.

Owns no memory: what is kept of a trace, and for whom, is the listener's. Must never raise into what it looks at.
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
    """What the engine does; the value is for people."""

    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    DEMAND_FETCH = "demand fetch"  # somebody waits for it
    PREFETCH = "prefetch"
    UPDATE = "update"  # of a group: reads, kernels and writes
    OPTIMIZER = "optimizer"  # a kernel at work on a tile
    COMMIT = "commit"
    SYNC = "sync"  # of the devices, within a commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that has ended.

    Attributes:
        label: as Slab.label gives it: identity of the job, group, and what it is about, with slashes between them.
        began_seconds, ended_seconds: of time.monotonic().
        nbytes: that were moved; 0: it moves none.
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
        """What it is about, within the job."""
        return "/".join(self.label.rsplit("/", 2)[1:])


class Tracer:
    """One for a store.

    Attributes:
        listener: is told each span when it has ended, on any thread; None: nobody listens.
    """

    def __init__(self) -> None:
        self.listener: Callable[[Span], None] | None = None

    @contextmanager
    def span(self, activity: Activity, label: str, nbytes: int = 0) -> Iterator[None]:
        """Something that lasts as long as the context."""
        if self.listener is None:
            yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            # Read once more: it may have gone meanwhile.
            if (listener := self.listener) is not None:
                ended = time.monotonic()
                listener(Span(activity=activity, label=label, began_seconds=began, ended_seconds=ended, nbytes=nbytes))

    def traced(self, activity: Activity, label: str, work: Callable[[ArgumentT], None]) -> Callable[[ArgumentT], None]:
        """The same work, each call of which is a span."""
        return work if self.listener is None else functools.partial(self._run, activity, label, work)

    def _run(self, activity: Activity, label: str, work: Callable[[ArgumentT], None], argument: ArgumentT) -> None:
        with self.span(activity, label):
            work(argument)
