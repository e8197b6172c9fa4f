"""The verb `paramserver-admin jobs`."""

from __future__ import annotations

from paramserver.admin import tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def jobs(address: Address = None, as_json: AsJson = False) -> None:
    """Show every job: its ranks, its last committed and durable steps, its bytes."""
    question = Question(
        call=lambda store, _: store.ListJobs(admin_pb.ListJobsRequest(), timeout=DEADLINE_SECONDS),
        show=lambda response: tables.jobs_table(response.jobs),
        total=totals.jobs,
    )
    run(address, question, as_json=as_json)
