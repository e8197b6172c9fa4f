"""The verb `paramserver-admin delete-job`."""

from __future__ import annotations

from typing import Annotated

import typer

from paramserver.admin import printers
from paramserver.admin.connection import DELETION_DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.v1 import store_admin_pb2 as admin_pb


def delete_job(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    address: Address = None,
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a job with all its steps. The daemon refuses this while a trainer is attached to the job."""
    if not yes:
        typer.confirm(f"Delete job {job!r} with all its committed steps? This cannot be undone.", abort=True)
    with connect(address) as store:
        response = store.DeleteJob(admin_pb.DeleteJobRequest(job=job), timeout=DELETION_DEADLINE_SECONDS)
        if as_json:
            printers.print_json(response)
        else:
            printers.console().print(printers.text(f"deleted job {job}"))
