"""The log of the daemon's last events, in memory: what happened to its jobs, sessions, tiers and devices.

Operators read it (`paramserver-admin events`). This module owns the events, whose number is bounded for each kind, so
that the commits of a fast job do not push out last week's events of damage. It is used on the daemon's event loop only.
This module must never hold an object of the event's subject, because an event outlives its job and its session.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# The most events of one kind that the event log keeps. When a further one comes, the oldest of that kind is dropped.
KEPT_OF_A_KIND = 250
# The most bytes of an event's text in UTF-8. The limit is needed because all kept events together must fit into one
# message, and clients receive at most 4 MiB. Names that clients choose have at most 1024 bytes, and an error text may
# quote several.
MAX_TEXT_BYTES = 1000


class EventKind(enum.StrEnum):
    """The kind of occurrence that an event reports."""

    DAEMON = "daemon"
    """The daemon itself: its start, its draining, its stop."""

    SESSION = "session"
    """A session began, broke, was taken up again, or ended for a reason."""

    JOB = "job"
    """A run opened a job or left it, or the job was rolled back or deleted."""

    COMMIT = "commit"
    """A step was committed, or its commit failed."""

    DAMAGE = "damage"
    """Stored bytes were found damaged."""

    TIER = "tier"
    """A tier was degraded, or works again."""

    BUDGET = "budget"
    """Requests began to wait for room in host memory, or wait no longer."""

    ADMIN = "admin"
    """An operator called a verb that changes something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the log of events, for example that a session ended.

    Attributes:
        number: a later event has a higher number; the first one of a daemon has 1.
        time: when the event happened, in seconds since 1970.
        kind: a lowercase word.
        subject: the name of the job, the client, the tier or the verb that the event is about. Clients choose names, so
            programs that show them to people escape them.
        text: one sentence for people, which may quote names.
    """

    number: int
    time: float
    kind: EventKind
    subject: str
    text: str


class EventLog:
    """The last events of a daemon, at most KEPT_OF_A_KIND of each kind; the oldest of a kind is dropped first."""

    def __init__(self) -> None:
        self._kept = {kind: deque[Event](maxlen=KEPT_OF_A_KIND) for kind in EventKind}
        self._newest = 0
        # `add` sets this asyncio event when a daemon event is added, which wakes the waiters. It then stores a new,
        # unset asyncio event here, on which the next waiters wait.
        self._added = asyncio.Event()

    def add(self, kind: EventKind, subject: str, text: str, *, once: bool = False) -> None:
        """Add an event that happens now.

        Args:
            kind: the kind of occurrence that the event reports.
            subject, text: see Event.
            once: do not add the event if the log still has one of the same kind with this subject and text.
        """
        text = _shortened(text)
        kept = self._kept[kind]
        if once and any((event.subject, event.text) == (subject, text) for event in kept):
            return
        self._newest += 1
        kept.append(Event(number=self._newest, time=time.time(), kind=kind, subject=subject, text=text))
        added, self._added = self._added, asyncio.Event()
        added.set()

    @property
    def newest_number(self) -> int:
        """The number of the newest event; 0 if there was none."""
        return self._newest

    def recent(self, limit: int, *, after: int = 0, kinds: Collection[EventKind] = ()) -> Sequence[Event]:
        """Return the newest events, oldest first.

        Args:
            limit: the most events that are returned.
            after: return only events with higher numbers.
            kinds: return only events of these kinds. If it is empty, return events of all kinds.
        """
        if limit <= 0:
            return []
        kept = [events for kind, events in self._kept.items() if not kinds or kind in kinds]
        merged = list(heapq.merge(*kept, key=lambda event: event.number))
        return [event for event in merged if event.number > after][-limit:]

    async def wait_after(self, number: int) -> None:
        """Wait until there is an event with a higher number."""
        while self._newest <= number:
            await self._added.wait()


def _shortened(text: str) -> str:
    """Return the text, or its beginning if it has more than MAX_TEXT_BYTES."""
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= MAX_TEXT_BYTES:
        return encoded.decode()
    return encoded[:MAX_TEXT_BYTES].decode(errors="ignore") + "..."
