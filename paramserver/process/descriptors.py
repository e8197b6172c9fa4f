"""How many files and connections the daemon may have open: raises the limit, and shares it out.

The kernel has one limit for both (RLIMIT_NOFILE). A daemon whose connections took all of it could not commit, for the
catalog opens files, nor let a local client in. So each listener gets a share of its own, and gRPC hangs up on what
comes beyond it: a flood at one listener takes nothing from the other one, nor from the daemon's own files.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from pathlib import Path

from paramserver.errors import StartError

log = logging.getLogger(__name__)

# For what the daemon opens by itself after the count: gRPC's own descriptors (six, measured), and for a moment each the
# token file, certificates, journals of the catalog and connections that ask for the arena.
RESERVED = 64
# Connections beside those of sessions: operators, health checks, and clients that are about to open a session.
BESIDE_SESSIONS = 64
LEAST_CONNECTIONS = 8


def raise_limit() -> None:
    """Raise this process's limit of open files as far as it may be raised without privileges."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Refused where the hard limit is above what the system allows now (fs.nr_open); then the soft one stays.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_of_a_listener(listeners: int, max_sessions: int) -> int:
    """Return how many connections each listener may have at once; call it when the daemon has opened its files.

    Raises:
        StartError: the limit of open files leaves room for fewer than LEAST_CONNECTIONS.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = sum(1 for _ in Path("/proc/self/fd").iterdir()) + RESERVED
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
