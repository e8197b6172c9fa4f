"""The open connections of the HTTP endpoint, of which strangers must not keep an operator's out.

A visitor is known once it has shown what the endpoint asks for: TLS and a token, where these are configured. Until then
it costs a thread that waits, and a descriptor, and has KNOWN_WITHIN_SECONDS. If there are MOST_VISITORS, the next one
takes the place of the oldest stranger of the host with the most connections. Each visitor keeps its place for
LEAST_SECONDS, which an honest one needs to be known even on a busy machine; connections that arrive meanwhile wait in
the kernel's queue, in their order. So a flood neither keeps an operator out nor makes the daemon work without a pause.

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

# The threads and descriptors that all visitors together can take. 64 hostile clients were seen to take 3 to 7 MB.
MOST_VISITORS = 128
LEAST_SECONDS = 1.0
# The time from the acceptance of a connection until its visitor must be known, however slowly the client goes on.
KNOWN_WITHIN_SECONDS = 10.0
# The time from the acceptance of a connection until its answer must have been taken.
ANSWERED_WITHIN_SECONDS = 60.0
LOG_SECONDS = 10.0
# The pause between two looks for a place while all are taken.
_LOOK_SECONDS = 0.1


class HttpVisitor:
    """One connection; its thread calls the methods, and Visitors ends it."""

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
        """Be served by another socket of the same connection, for TLS.

        Raises:
            ConnectionAbortedError: the connection was ended meanwhile.
        """
        with self._lock:
            self._connection = connection
            if self.is_ended:
                raise ConnectionAbortedError("the connection was ended")

    def be_known(self) -> None:
        """Note that the visitor has shown what the endpoint asks for."""
        with self._lock:
            self.is_known = True

    def end(self) -> None:
        """End the connection, so that its thread goes on with an error. The caller holds the lock."""
        self.is_ended = True
        # The client may have ended the connection already, or its thread may be about to replace the socket. The method
        # of the plain socket is called, because that of a TLS socket would have the thread go on without TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


class Visitors:
    """All connections that are open now. The thread that accepts connections calls `admit`, `look` and `turn_away`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The connections, oldest first.
        self._here: list[HttpVisitor] = []
        self._is_closed = False
        self._refused: Counter[str] = Counter()
        self._last_host = ""
        self._next_line = 0.0

    def admit(self, connection: socket.socket, host: str) -> HttpVisitor:
        """Return a visitor for a new connection, once there is a place for it."""
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
        """Count a visitor that was refused, for the log. Any thread may call this."""
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
        """Have `admit` wait no longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _count(self) -> int:
        return sum(not visitor.is_ended for visitor in self._here)

    def _make_room(self) -> None:
        """End the connection that has to give way, if it has had LEAST_SECONDS."""
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
