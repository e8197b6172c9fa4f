"""The names that the shell offers for the argument JOB when the user presses Tab: the jobs that the daemons have.

This module must never fail or wait long, because the shell calls it while a person types. It must never offer a name
that the shell would act upon, because the shell puts it into the command line as it is.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Annotated, Any

import typer

from paramserver.admin.connection import CREDENTIALS, AdminCredentials
from paramserver.admin.nodes import addresses_of, ask
from paramserver.v1 import store_admin_pb2 as admin_pb

DEADLINE_SECONDS = 2.0
_SAFE = re.compile(r"[\w.,/@%+=-]+", re.ASCII)


def job_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin with the typed text, without names that a shell would interpret."""
    parent: dict[str, Any] = context.parent.params if context.parent is not None else {}
    # If the daemon's address or a credentials file cannot be used, shell completion offers no names and prints no
    # error, because the command itself reports the error when the user calls it.
    with contextlib.suppress(typer.Exit), contextlib.redirect_stderr(io.StringIO()):
        CREDENTIALS.set(
            AdminCredentials(**{key: value for key, value in parent.items() if key in AdminCredentials.__slots__})
        )
        answers = ask(
            addresses_of(context.params.get("address")),
            lambda store, _: store.ListJobs(admin_pb.ListJobsRequest(), timeout=DEADLINE_SECONDS),
        )
        names = {job.name for one in answers if one.result is not None for job in one.result.jobs}
        return sorted(name for name in names if name.startswith(incomplete) and _SAFE.fullmatch(name))
    return []


Job = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=job_names)]
