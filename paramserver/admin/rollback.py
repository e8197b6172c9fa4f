"""The verb `paramserver-admin rollback`."""

from __future__ import annotations

from typing import Annotated

import typer

from paramserver.admin import printers
from paramserver.admin.completion import Job
from paramserver.admin.connection import DELETION_DEADLINE_SECONDS, Address, AsJson, Yes, confirm
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def rollback(
    job: Job,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="A retained step; `versions` shows them.")],
    address: Address = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Make a retained step of a job the newest one again. The daemon refuses this while a trainer is attached to it.

    Newer steps are discarded, unless they are kept, and replicas do not bring them back. Roll a job of several nodes
    back at all their daemons.
    """
    confirm(f"Roll job {job!r} back to step {step}, and discard its newer steps? This cannot be undone.", yes=yes)
    request = admin_pb.RollBackJobRequest(job=job, step=step)
    question = Question(
        call=lambda store, _: store.RollBackJob(request, timeout=DELETION_DEADLINE_SECONDS),
        show=lambda result: printers.text(f"rolled job {job} back from step {result.former_step} to step {step}"),
    )
    run(address, question, as_json=as_json)
