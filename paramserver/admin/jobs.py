"""The verb `paramserver-admin jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from paramserver.admin import tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def jobs(
    address: Address = None,
    as_json: AsJson = False,
    limit: Annotated[int, typer.Option(min=0, help="Most rows of the table; 0: all. JSON has all of them.")] = 1000,
) -> None:
    """Show every job: its ranks, its last committed and durable steps, its bytes."""
    question = Question(
        call=lambda store, _: store.ListJobs(admin_pb.ListJobsRequest(), timeout=DEADLINE_SECONDS),
        show=lambda response: limited_table(response.jobs, limit),
        total=totals.jobs,
    )
    run(address, question, as_json=as_json)


def limited_table(jobs: Sequence[admin_pb.JobInfo], limit: int) -> RenderableType:
    """Return a table of the first `limit` jobs; of all jobs if it is 0.

    The limit exists because rich needs 1 ms for each row.
    """
    if not limit or len(jobs) <= limit:
        return tables.jobs_table(jobs)
    note = f"Only the first {limit} of {len(jobs)} jobs are shown: --limit 0 shows all, --json has all."
    return Group(tables.jobs_table(jobs[:limit]), note)
