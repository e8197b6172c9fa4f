"""The verb `paramserver-admin jobs`."""

from __future__ import annotations

from paramserver.admin import printers
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.v1 import store_admin_pb2 as admin_pb


def jobs(address: Address = None, as_json: AsJson = False) -> None:
    """Show every job: its ranks, its last committed and durable steps, its bytes."""
    with connect(address) as store:
        response = store.ListJobs(admin_pb.ListJobsRequest(), timeout=DEADLINE_SECONDS)
        if as_json:
            printers.print_json(response)
        else:
            printers.console().print(printers.jobs_table(response.jobs))
