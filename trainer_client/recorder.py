"""Takes note of what a rank does and waits for: sums for the report of each step, spans only while a trace is taken.

Owns what was noted since the last step ended. Must never communicate: noting costs two readings of the clock, and no
more. All times are seconds of time.monotonic().
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# A trace of so many spans is some 50 MB of JSON. Later ones are left out, and the trace says so.
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
    """Bytes that are on their way to it."""

    UPDATE = "update"
    """The optimizer's update of the bytes that it wants."""

    GRADIENT_MEMORY = "gradient memory"
    """Room in the store's host memory for a gradient."""

    HAND_OVER = "hand-over"
    """The store's word that it has taken gradients over."""

    COMMIT = "commit"
    """The commit of the last step, or room for what takes part in it."""

    DAEMON = "daemon"
    """The next store daemon, after the last one was lost."""

    RANKS = "other ranks"
    """A collective: that the others come to it, and the transfer itself."""


class Link(enum.Enum):
    """Ways that a rank's bytes take."""

    FROM_STORE = "store_to_trainer"
    TO_STORE = "trainer_to_store"
    COLLECTIVES = "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that lasted; `row` is where people look for it."""

    row: str
    name: str
    began: float
    ended: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class StallKey:
    """`phase` is that of the step in which it was waited, `where` the unit or the collective."""

    phase: str
    cause: Cause
    where: str


@dataclass(slots=True)
class StepSums:
    """What was noted within one step, in seconds and bytes; `link_seconds` are the busy ones of this rank's thread."""

    began: float
    ended: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stalls: dict[StallKey, float] = field(default_factory=lambda: defaultdict(float))
    link_bytes: Counter[Link] = field(default_factory=Counter)
    link_seconds: dict[Link, float] = field(default_factory=lambda: defaultdict(float))
    # By phase, without the waits in them.
    gather_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # How often the store daemon was restarted.
    restarts: int = 0


class Recorder:
    """One for each rank. Called on the thread that trains; `moved`, `fetched` and `restarted` on any."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._sums = StepSums(now)
        self._moving = threading.Lock()
        self._phase = "idle"
        self._phase_began = now
        self._stalled_ever = 0.0
        self._spans: list[Span] | None = None
        self._computing: tuple[str, float] | None = None

    @property
    def is_tracing(self) -> bool:
        return self._spans is not None

    def enter_phase(self, name: str) -> None:
        """What this rank does from now on, as phases.py names it."""
        now = time.monotonic()
        self._sums.phases[self._phase] += now - self._phase_began
        self._note(PHASES_ROW, self._phase, self._phase_began, now)
        self._phase, self._phase_began = name, now

    def compute(self, part: str | None, unit: str = "") -> None:
        """The model's code that runs from now on, for traces: "forward" or "backward" of a unit ("": the root); None:
        none of it."""
        if self._spans is None:
            return
        now, name = time.monotonic(), None if part is None else f"{part} {unit or ROOT_NAME}"
        if self._computing is not None:
            if self._computing[0] == name:
                return
            self._note(COMPUTE_ROW, *self._computing, now)
        self._computing = None if name is None else (name, now)

    def stalled(self, cause: Cause, where: str, began: float, ended: float) -> None:
        """This rank has waited."""
        if ended > began:
            self._sums.stalls[StallKey(self._phase, cause, where)] += ended - began
            self._stalled_ever += ended - began
            self._note(f"wait: {cause.value}", where, began, ended)

    @contextmanager
    def waiting(self, cause: Cause, where: str) -> Iterator[None]:
        """This rank waits within the context."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.stalled(cause, where, began, time.monotonic())

    @contextmanager
    def gathering(self, unit: str) -> Iterator[None]:
        """A unit is made whole within the context."""
        began, stalled = time.monotonic(), self._stalled_ever
        try:
            yield
        finally:
            ended = time.monotonic()
            self._sums.gather_seconds[self._phase] += ended - began - (self._stalled_ever - stalled)
            self._note(GATHERS_ROW, unit or ROOT_NAME, began, ended)

    def moved(self, link: Link, where: str, nbytes: int, began: float) -> None:
        """Bytes were moved, from then to now."""
        ended = time.monotonic()
        with self._moving:
            self._sums.link_bytes[link] += nbytes
            self._sums.link_seconds[link] += ended - began
        self._note(f"link: {link.value.replace('_', ' ')}", where, began, ended, nbytes)

    def fetched(self, unit: str, began: float) -> None:
        """What was asked for then has come; on any thread."""
        self._note(FETCHES_ROW, unit, began, time.monotonic())

    def restarted(self) -> None:
        """The store daemon was restarted; on any thread."""
        with self._moving:
            self._sums.restarts += 1

    def end_step(self) -> StepSums:
        """What was noted since the last call; the next step begins."""
        self.enter_phase(self._phase)
        with self._moving:
            sums, self._sums = self._sums, StepSums(self._phase_began)
        sums.ended = self._phase_began
        return sums

    def start_trace(self) -> None:
        """Spans are kept from now on."""
        self._spans = []

    def stop_trace(self) -> list[Span]:
        """The spans since `start_trace`, at most MAX_SPANS."""
        self.compute(None)
        spans, self._spans = self._spans or [], None
        return spans

    def _note(self, row: str, name: str, began: float, ended: float, nbytes: int = 0) -> None:
        # Once: another thread may end the trace meanwhile.
        spans = self._spans
        if spans is not None and len(spans) < MAX_SPANS:
            spans.append(Span(row=row, name=name, began=began, ended=ended, nbytes=nbytes))
