"""The verb `paramserver-admin delete-job`."""

from __future__ import annotations

from paramserver.admin import printers
from paramserver.admin.completion import Job
from paramserver.admin.connection import DELETION_DEADLINE_SECONDS, Address, AsJson, Yes, confirm
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def delete_job(job: Job, address: Address = None, as_json: AsJson = False, yes: Yes = False) -> None:
    """Delete a job with all its steps. The daemon refuses this while a trainer is attached to the job."""
    confirm(f"Delete job {job!r} with all its committed and kept steps? This cannot be undone.", yes=yes)
    question = Question(
        call=lambda store, _: store.DeleteJob(admin_pb.DeleteJobRequest(job=job), timeout=DELETION_DEADLINE_SECONDS),
        show=lambda _: printers.text(f"deleted job {job}"),
    )
    run(address, question, as_json=as_json)
