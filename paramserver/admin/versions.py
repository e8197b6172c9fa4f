"""The verb `paramserver-admin versions`."""

from __future__ import annotations

from paramserver.admin import tables, totals
from paramserver.admin.completion import Job
from paramserver.admin.connection import WALK_DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def versions(job: Job, address: Address = None, as_json: AsJson = False) -> None:
    """Show the steps of a job that the store holds: retained, kept or read, with their bytes on each tier."""
    question = Question(
        call=lambda store, _: store.ListSteps(admin_pb.ListStepsRequest(job=job), timeout=WALK_DEADLINE_SECONDS),
        show=lambda response: tables.steps_table(job, response),
        total=totals.steps,
    )
    run(address, question, as_json=as_json)
