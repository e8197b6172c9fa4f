"""The recorder of what a rank does and waits for: sums for the report of each step, and spans while a trace is taken.

This module owns what was recorded since the last step ended. It must never communicate, because a record may cost two
readings of the clock and no more. All times are seconds of time.monotonic().

[Note: work of a device] An accelerator does later what it is given, so a clock of the host around a kernel or a
collective would measure how long its launch takes. Such work is measured by a stopwatch of the device, which reports
when the work is done, mostly in the next step; the sums of that step have it.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

# The limit of spans in a trace, which is then some 50 MB of JSON. Later spans are left out, and the log says so.
MAX_SPANS = 300_000

# The name of the root unit and the root module, which have no FQN: in the store, in traces and in messages.
ROOT_NAME = "(root)"

PHASES_ROW = "phases"
COMPUTE_ROW = "compute"
GATHERS_ROW = "gathers"
FETCHES_ROW = "fetches"


class Cause(enum.Enum):
    """What a rank can wait for."""

    FETCH = "fetch"
    """Bytes that it has asked the store for."""

    UPDATE = "update"
    """The optimizer's update of bytes that it has asked the store for."""

    GRADIENT_MEMORY = "gradient memory"
    """Room in the store's host memory for a gradient."""

    ACTIVATION = "activation"
    """Room in the store for an activation, or an activation that comes back."""

    HAND_OVER = "hand-over"
    """The store's response that it has accepted gradients."""

    COMMIT = "commit"
    """The commit of the last step, or memory of the store for values that take part in a commit."""

    DAEMON = "daemon"
    """The next store daemon, after the last one was lost."""

    RANKS = "other ranks"
    """A collective: the arrival of the other ranks, and the transfer itself."""


class Link(enum.Enum):
    """The links over which a rank's bytes move."""

    FROM_STORE = "store_to_trainer"
    TO_STORE = "trainer_to_store"
    COLLECTIVES = "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """An interval of time in a trace.

    Attributes:
        row: the row of the trace that shows it.
        name: its label there.
        began: its begin.
        ended: its end.
        nbytes: the bytes that were moved in it, if any.
    """

    row: str
    name: str
    began: float
    ended: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StallKey:
    """What waits are summed by: phase of the step, cause, and the unit or collective that was waited for."""

    phase: str
    cause: Cause
    where: str


@dataclass(slots=True)
class StepSums:
    """What was recorded within one step.

    Attributes:
        began: begin of the step.
        ended: end of the step.
        phases: seconds by phase.
        stalls: seconds of waits.
        link_bytes: bytes moved by link.
        link_seconds: seconds that this rank's threads spent on moving them.
        gather_seconds: seconds of gathers by phase, without the waits in them.
        restarts: number of restarts of the store daemon.
        boundary_bytes: bytes of the boundaries of activation checkpoints that were saved, and of those moved to the
            store.
        compute_seconds: seconds of the model's own work by phase, by the stopwatch of the rank: on an accelerator
            without any wait, on the CPU with those that are not part of a gather.
        to_device_bytes: bytes that were copied to the accelerator.
        to_device_seconds: seconds that the accelerator took for these copies.
    """

    began: float
    ended: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stalls: dict[StallKey, float] = field(default_factory=lambda: defaultdict(float))
    link_bytes: Counter[Link] = field(default_factory=Counter)
    link_seconds: dict[Link, float] = field(default_factory=lambda: defaultdict(float))
    gather_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    restarts: int = 0
    boundary_bytes: Counter[str] = field(default_factory=Counter)
    compute_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    to_device_bytes: int = 0
    to_device_seconds: float = 0.0


class Stopwatch(Protocol):
    """A measurement that has begun."""

    def stop(self, report: Callable[[float, float], None]) -> None:
        """End it. `report` gets begin and end: at once, or when the device has done what it was given meanwhile."""


class HostStopwatch:
    """A measurement of the thread that makes it."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def stop(self, report: Callable[[float, float], None]) -> None:
        report(self._began, time.monotonic())


class Recorder:
    """The recorder of one rank. Its training thread calls it; any thread may call `moved`, `fetched`, `restarted`."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._sums = StepSums(now)
        self._moving = threading.Lock()
        self._phase = "idle"
        self._phase_began = now
        self._stalled_ever = 0.0
        # The lists of the traces that are being taken. A tuple that is replaced as a whole, because other threads
        # iterate over it.
        self._traces: tuple[list[TraceSpan], ...] = ()
        self._computing: tuple[str, Stopwatch] | None = None
        self._stopwatch: Callable[[], Stopwatch] = HostStopwatch

    @property
    def is_tracing(self) -> bool:
        return bool(self._traces)

    @property
    def phase(self) -> str:
        """The phase of the step that is now, as phases.py names it."""
        return self._phase

    @property
    def step_began(self) -> float:
        """The begin of the step under way."""
        return self._sums.began

    def measure_with(self, stopwatch: Callable[[], Stopwatch]) -> None:
        """Measure computation with these from now on, because it is work of a device."""
        self._stopwatch = stopwatch

    def enter_phase(self, name: str) -> None:
        """Begin a phase of the step, as phases.py names it; the former phase ends."""
        now = time.monotonic()
        self._sums.phases[self._phase] += now - self._phase_began
        self._note(PHASES_ROW, self._phase, self._phase_began, now)
        self._phase, self._phase_began = name, now

    def compute(self, part: str | None, unit: str = "") -> None:
        """Note for a trace which code of the model runs from now on.

        Args:
            part: "forward" or "backward"; None: no code of the model runs.
            unit: name of the unit; "" is the root.
        """
        if not self._traces:
            return
        name = None if part is None else f"{part} {unit or ROOT_NAME}"
        if self._computing is not None:
            former, stopwatch = self._computing
            if former == name:
                return
            stopwatch.stop(partial(self._note, COMPUTE_ROW, former))
        self._computing = None if name is None else (name, self._stopwatch())

    def stalled(self, cause: Cause, where: str, began: float, ended: float) -> None:
        """Add a wait of this rank, from `began` to `ended`; `where` is the unit or collective."""
        if ended > began:
            self._sums.stalls[StallKey(self._phase, cause, where)] += ended - began
            self._stalled_ever += ended - began
            self._note(f"wait: {cause.value}", where, began, ended)

    @contextmanager
    def waiting(self, cause: Cause, where: str) -> Iterator[None]:
        """Add the duration of the context as a wait of this rank."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.stalled(cause, where, began, time.monotonic())

    @contextmanager
    def gathering(self, unit: str) -> Iterator[None]:
        """Add the duration of the context, less the waits in it, as a gather of `unit`."""
        began, stalled = time.monotonic(), self._stalled_ever
        try:
            yield
        finally:
            ended = time.monotonic()
            self._sums.gather_seconds[self._phase] += ended - began - (self._stalled_ever - stalled)
            self._note(GATHERS_ROW, unit or ROOT_NAME, began, ended)

    def moved(self, link: Link, where: str, nbytes: int, began: float, ended: float | None = None) -> None:
        """Add bytes that were moved between the times `began` and `ended` (now, if None). Any thread may call this."""
        ended = time.monotonic() if ended is None else ended
        with self._moving:
            self._sums.link_bytes[link] += nbytes
            self._sums.link_seconds[link] += ended - began
        self._note(f"link: {link.value.replace('_', ' ')}", where, began, ended, nbytes)

    def fetched(self, unit: str, began: float) -> None:
        """Note for a trace that the bytes requested at `began` have arrived; on any thread."""
        self._note(FETCHES_ROW, unit, began, time.monotonic())

    def boundary(self, **nbytes: int) -> None:
        """Add bytes of boundaries that were `saved`, `moved` to the store, or freed to be computed `again`."""
        self._sums.boundary_bytes.update(nbytes)

    def computed(self, phase: str, began: float, ended: float) -> None:
        """Add the time between two uses of units in a phase, as a stopwatch has measured it."""
        self._sums.compute_seconds[phase] += ended - began

    def copied_to_device(self, nbytes: int, began: float, ended: float) -> None:
        """Add a copy from host memory to the accelerator."""
        self._sums.to_device_bytes += nbytes
        self._sums.to_device_seconds += ended - began

    def restarted(self) -> None:
        """Count a restart of the store daemon; on any thread."""
        with self._moving:
            self._sums.restarts += 1

    def end_step(self) -> StepSums:
        """Return what was recorded since the last call, and begin the next step."""
        self.enter_phase(self._phase)
        with self._moving:
            sums, self._sums = self._sums, StepSums(self._phase_began)
        sums.ended = self._phase_began
        return sums

    def start_trace(self) -> list[TraceSpan]:
        """Begin to keep spans in a new list, at most MAX_SPANS, and return it. Several traces may be taken at once."""
        spans: list[TraceSpan] = []
        self._traces = (*self._traces, spans)
        return spans

    def stop_trace(self, spans: list[TraceSpan]) -> list[TraceSpan]:
        """Stop keeping spans in the list that `start_trace` returned, and return it."""
        # The code of the model that runs now ends for this trace, and begins anew for the others.
        computing = self._computing
        self.compute(None)
        self._traces = tuple(kept for kept in self._traces if kept is not spans)
        if self._traces and computing is not None:
            self._computing = (computing[0], self._stopwatch())
        return spans

    def _note(self, row: str, name: str, began: float, ended: float, nbytes: int = 0) -> None:
        # The attribute is read only once, because another thread may end a trace meanwhile.
        if traces := self._traces:
            span = TraceSpan(row=row, name=name, began=began, ended=ended, nbytes=nbytes)
            for spans in traces:
                if len(spans) < MAX_SPANS:
                    spans.append(span)
