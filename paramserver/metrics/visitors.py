"""The open connections of the HTTP endpoint. The connections of strangers must not keep an operator's connection out.

A visitor is known once it has shown what the endpoint asks for: TLS and a token, where these are configured. A visitor
that is not known takes a descriptor and a thread that waits, and is ended after KNOWN_WITHIN_SECONDS. If there are
MOST_VISITORS, the next one takes the place of the oldest stranger of the host with the most connections. Each visitor
keeps its place for LEAST_SECONDS, in which an honest one becomes known even on a busy machine. Connections that arrive
meanwhile wait in the kernel's queue, in their order. So a flood neither keeps an operator out nor makes the daemon work
without a pause.

This module owns the decision which connection ends. It must never log more than one line in LOG_SECONDS.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter

log = logging.getLogger(__name__)

# The most HTTP connections that are open at once, each with a thread and a descriptor. 64 hostile clients were seen to
# take 3 to 7 MB of memory.
MOST_VISITORS = 128
LEAST_SECONDS = 1.0
# The seconds after its acceptance within which an HTTP connection must have shown the certificate and the token that
# are needed. A connection that is slower is ended.
KNOWN_WITHIN_SECONDS = 10.0
# The seconds after its acceptance within which the client of an HTTP connection must have received the whole answer. A
# connection that is slower is ended.
ANSWERED_WITHIN_SECONDS = 60.0
LOG_SECONDS = 10.0
# If MOST_VISITORS connections are open, a new one waits. This is the pause between two checks whether one has ended.
_LOOK_SECONDS = 0.1


class HttpVisitor:
    """One connection to the endpoint. The thread that serves it calls the methods, and Visitors ends it."""

    def __init__(self, connection: socket.socket, host: str, lock: threading.Condition) -> None:
        self.host = host
        self.began = time.monotonic()
        self.is_known = False
        self.is_ended = False
        self._connection = connection
        self._lock = lock

    @property
    def connection(self) -> socket.socket:
        """The socket by which the visitor is served now."""
        return self._connection

    @property
    def deadline(self) -> float:
        """The time, of the monotonic clock, at which the connection is ended."""
        return self.began + (ANSWERED_WITHIN_SECONDS if self.is_known else KNOWN_WITHIN_SECONDS)

    def go_on_with(self, connection: socket.socket) -> None:
        """Go on with another socket of the same connection: the TLS socket that wraps the first one.

        Raises:
            ConnectionAbortedError: the connection was ended meanwhile.
        """
        with self._lock:
            self._connection = connection
            if self.is_ended:
                raise ConnectionAbortedError("the connection was ended")

    def be_known(self) -> None:
        """Mark the visitor as known, because it has shown the TLS certificate and the token that are needed."""
        with self._lock:
            self.is_known = True

    def end(self) -> None:
        """End the connection, so that its thread goes on with an error. The caller holds the lock."""
        self.is_ended = True
        # `shutdown` fails if the client has ended the connection already, so OSError is ignored. The method of the
        # plain socket is called, because that of a TLS socket would let the connection's thread go on without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


class Visitors:
    """All connections to the endpoint that are open now. It ends those that take too long or are too many.

    The thread that accepts connections calls `admit` and `look`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The open connections, oldest first.
        self._here: list[HttpVisitor] = []
        self._is_closed = False
        self._refused: Counter[str] = Counter()
        self._last_host = ""
        self._next_line = 0.0

    def admit(self, connection: socket.socket, host: str) -> HttpVisitor:
        """Return a visitor for a new connection. If MOST_VISITORS are open, wait until one of them has ended."""
        with self._changed:
            while self._count() >= MOST_VISITORS and not self._is_closed:
                self.look()
                self._make_room()
                self._changed.wait(_LOOK_SECONDS)
            visitor = HttpVisitor(connection, host, self._changed)
            self._here.append(visitor)
            return visitor

    def leave(self, visitor: HttpVisitor) -> None:
        """Forget a visitor, whose socket is about to be closed."""
        with self._changed:
            self._here.remove(visitor)
            self._changed.notify()

    def note_refusal(self, visitor: HttpVisitor, reason: str) -> None:
        """Count a visitor whose request was refused; `look` writes the count to the log. Any thread may call this."""
        with self._changed:
            if not visitor.is_ended:
                self._count_refusal(visitor, reason)

    def look(self) -> None:
        """End the connections whose time is over, and tell the log what was refused. Call this at least each second."""
        with self._changed:
            now = time.monotonic()
            for visitor in self._here:
                if now >= visitor.deadline and not visitor.is_ended:
                    self._end(visitor, "too slow")
            self._tell(now)

    def close(self) -> None:
        """Let calls of `admit` return without waiting for another visitor's end, because the endpoint closes."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _count(self) -> int:
        return sum(not visitor.is_ended for visitor in self._here)

    def _make_room(self) -> None:
        """End the connection that a new one takes the place of, unless it is younger than LEAST_SECONDS."""
        waiting = [visitor for visitor in self._here if not visitor.is_ended]
        connections = Counter(visitor.host for visitor in waiting)
        strangers = [visitor for visitor in waiting if not visitor.is_known]
        oldest = max(strangers or waiting, key=lambda visitor: connections[visitor.host])
        if time.monotonic() >= oldest.began + LEAST_SECONDS:
            self._end(oldest, "gave way to others")

    def _end(self, visitor: HttpVisitor, reason: str) -> None:
        visitor.end()
        self._count_refusal(visitor, reason)

    def _count_refusal(self, visitor: HttpVisitor, reason: str) -> None:
        self._refused[reason] += 1
        self._last_host = visitor.host

    def _tell(self, now: float) -> None:
        if not self._refused or now < self._next_line:
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self._refused.items()))
        log.warning("metrics_listen: refused connections: %s; the last was from %s", reasons, self._last_host)
        self._refused.clear()
        self._next_line = now + LOG_SECONDS
