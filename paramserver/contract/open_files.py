"""The limit of open files of a process (RLIMIT_NOFILE), which its sockets count against, too.

Many systems have a low soft limit, such as 1,024, only because of programs that use `select`. Daemon and trainers
raise theirs to the hard limit when they start.
"""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_limit() -> None:
    """Raise this process's soft limit of open files to its hard limit, which needs no privileges."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel refuses the new soft limit if the hard limit is above fs.nr_open. In that case the soft limit stays as
    # it is.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
