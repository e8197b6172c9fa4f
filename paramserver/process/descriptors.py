"""The limit of open files, and its division between the daemon's own files and the connections of each listener.

The kernel has one limit for files and connections (RLIMIT_NOFILE). If connections took all of it, the daemon could not
commit, because the catalog opens files, and could not accept a local client. So each listener gets its own share, and
gRPC closes connections beyond it. A flood of connections at one listener takes nothing from the other listener or from
the daemon's files.
"""

from __future__ import annotations

import logging
import resource
from pathlib import Path

from paramserver.errors import StartError

log = logging.getLogger(__name__)

# The descriptors that the daemon does not use for connections, because it opens files after it has divided its limit:
# gRPC's own (six, measured), MOST_PROCESSES of sessions/client_process.py, and for a moment each the token file,
# certificates, journals of the catalog and connections to the arena's socket.
RESERVED = 64 + 32
# The connections that the daemon allows beside those of sessions: for operators, health checks, and clients that are
# about to open a session.
BESIDE_SESSIONS = 64
LEAST_CONNECTIONS = 8


def connections_of_a_listener(listeners: int, max_sessions: int, elsewhere: int = 0) -> int:
    """Return how many connections each listener may have at once. Call this after the daemon has opened its files.

    `elsewhere` is the most connections that the daemon has besides those of these listeners.

    Raises:
        StartError: the limit of open files leaves room for fewer than LEAST_CONNECTIONS.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = sum(1 for _ in Path("/proc/self/fd").iterdir()) + RESERVED + elsewhere
    wanted = max_sessions + BESIDE_SESSIONS
    enough = taken + listeners * wanted
    if limit == resource.RLIM_INFINITY or limit >= enough:
        return wanted
    connections = (limit - taken) // listeners
    if connections < LEAST_CONNECTIONS:
        raise StartError(
            f"the limit of {limit} open files leaves room for {max(0, connections)} connections: the daemon itself "
            f"needs {taken} files; raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd) to {enough}"
        )
    if connections < max_sessions:
        log.warning(
            "the limit of %d open files allows %d connections at once to each listener, and max_sessions is %d: raise "
            "the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd) to %d, or lower max_sessions",
            *(limit, connections, max_sessions, enough),
        )
    return connections
