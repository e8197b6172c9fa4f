"""The names of the replicas of jobs that span several daemons.

A daemon may hold its own part of such a job and the replica of another daemon's part, so the replica has a name of its
own. The replica of a job on one daemon has the name of the job. This module owns the form of these names.
"""

from __future__ import annotations

import re

_FORM = re.compile(r"(?P<job>.+)@replica-\d+", re.DOTALL)


def name_replica(job: str, part: int) -> str:
    """Return the name of the replica of a job's part; the parts are numbered by the first ranks of their daemons."""
    return f"{job}@replica-{part}"


def replicated_job(name: str) -> str | None:
    """Return the name of the job whose part the replica `name` copies, or None if the name is not one of a replica."""
    match = _FORM.fullmatch(name)
    return None if match is None else match["job"]
