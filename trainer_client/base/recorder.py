"""The recorder of what a rank does and waits for: sums for the report of each step, and spans while a trace is taken.

This module owns what was recorded since the last step ended. It must never communicate, because a record may cost two
readings of the clock and no more. All times are seconds of time.monotonic().

[Note: work of a device] An accelerator does later what it is given, so a clock of the host around a kernel or a
collective would measure how long its launch takes. Such work is measured by a stopwatch of the device, which reports
when the work is done. This is mostly in the next step, so the sums of the next step contain the work.
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

# The limit on the number of spans in a trace, which is then some 50 MB of JSON. Later spans are left out, and the log
# says so.
MAX_SPANS = 300_000

# The name that the store, traces and messages use for the root unit and the root module, which have no FQN.
ROOT_NAME = "(root)"

PHASES_ROW = "phases"
COMPUTE_ROW = "compute"
GATHERS_ROW = "gathers"
FETCHES_ROW = "fetches"


class Cause(enum.Enum):
    """The causes of waits: what a rank can wait for. The report of a step has the seconds of each."""

    FETCH = "fetch"
    """Bytes that the rank has asked the store for."""

    UPDATE = "update"
    """The optimizer's update of bytes that the rank has asked the store for."""

    GRADIENT_MEMORY = "gradient memory"
    """Room in the store's host memory for a gradient."""

    ACTIVATION = "activation"
    """Room in the store for an activation, or an activation that comes back."""

    HAND_OVER = "hand-over"
    """The store's response that it has accepted the rank's gradients."""

    COMMIT = "commit"
    """The commit of the last step, or memory of the store for values that take part in a commit."""

    DAEMON = "daemon"
    """A new store daemon, after the former one was lost."""

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
        row: the row of the trace's picture that shows the span, such as that of one link.
        name: the label of the span in that row.
        began: the time at which the span begins.
        ended: the time at which it ends.
        nbytes: the bytes that were moved in the span; 0 if it shows no movement.
    """

    row: str
    name: str
    began: float
    ended: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StallKey:
    """The key under which a step's waits are summed. Waits with the same three attributes are one sum.

    Attributes:
        phase: the phase of the step in which the rank has waited.
        cause: what the rank has waited for.
        where: the unit or the collective that needed it.
    """

    phase: str
    cause: Cause
    where: str


@dataclass(slots=True)
class StepSums:
    """The sums that a Recorder has made within one step, for the step's report.

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
        compute_seconds: seconds of the model's own work by phase, as the rank's stopwatch measures it. On an
            accelerator they contain no wait. On the CPU they contain the waits that are not part of a gather.
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
    """A measurement of the time that work takes, which begins when the object is made."""

    def stop(self, report: Callable[[float, float], None]) -> None:
        """End the measurement. `report` gets its begin and end, at once or when the device has done that work."""


class HostStopwatch:
    """A measurement with the host's clock, which begins when the object is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def stop(self, report: Callable[[float, float], None]) -> None:
        report(self._began, time.monotonic())


class Recorder:
    """The recorder of one rank, which sums up times and bytes of each step, and keeps the spans of traces.

    The training thread of the rank calls it. Any thread may call `moved`, `fetched` and `restarted`.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self._sums = StepSums(now)
        self._moving = threading.Lock()
        self._phase = "idle"
        self._phase_began = now
        self._stalled_ever = 0.0
        # The traces that are being taken, each a list of spans. The tuple is replaced and never changed, because other
        # threads iterate over it.
        self._traces: tuple[list[TraceSpan], ...] = ()
        self._computing: tuple[str, Stopwatch] | None = None
        self._stopwatch: Callable[[], Stopwatch] = HostStopwatch

    @property
    def is_tracing(self) -> bool:
        return bool(self._traces)

    @property
    def phase(self) -> str:
        """The phase that the step is in now, as phases.py names it."""
        return self._phase

    @property
    def step_began(self) -> float:
        """The time at which the step under way began."""
        return self._sums.began

    def measure_with(self, stopwatch: Callable[[], Stopwatch]) -> None:
        """Measure computation with stopwatches that `stopwatch` makes from now on, because a device does the work."""
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
        """Note for a trace that the bytes requested at `began` have arrived. Any thread may call this."""
        self._note(FETCHES_ROW, unit, began, time.monotonic())

    def boundary(self, **nbytes: int) -> None:
        """Add bytes of boundaries of activation checkpoints to the sums of the step.

        Args:
            nbytes: the bytes, by `saved` (kept for the backward), `moved` (to the store) or `again` (freed, because
                they are computed again).
        """
        self._sums.boundary_bytes.update(nbytes)

    def computed(self, phase: str, began: float, ended: float) -> None:
        """Add the time that the model's own work took between two uses of units, as a stopwatch has measured it."""
        self._sums.compute_seconds[phase] += ended - began

    def copied_to_device(self, nbytes: int, began: float, ended: float) -> None:
        """Add the bytes and the seconds of a copy from host memory to the accelerator to the sums of the step."""
        self._sums.to_device_bytes += nbytes
        self._sums.to_device_seconds += ended - began

    def restarted(self) -> None:
        """Count a restart of the store daemon. Any thread may call this."""
        with self._moving:
            self._sums.restarts += 1

    def end_step(self) -> StepSums:
        """Return the sums since the last call of this method, and begin those of the next step."""
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
        # The trace ends while a module computes. The module's span in this trace ends here, and a new span of the
        # module begins for the traces that go on.
        computing = self._computing
        self.compute(None)
        self._traces = tuple(kept for kept in self._traces if kept is not spans)
        if self._traces and computing is not None:
            self._computing = (computing[0], self._stopwatch())
        return spans

    def _note(self, row: str, name: str, began: float, ended: float, nbytes: int = 0) -> None:
        # `_traces` is read only once, because another thread may end a trace between two reads.
        if traces := self._traces:
            span = TraceSpan(row=row, name=name, began=began, ended=ended, nbytes=nbytes)
            for spans in traces:
                if len(spans) < MAX_SPANS:
                    spans.append(span)
