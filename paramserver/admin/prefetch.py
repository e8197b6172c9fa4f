"""The verb `paramserver-admin prefetch`."""

from __future__ import annotations

from paramserver.admin import tables, totals
from paramserver.admin.connection import WALK_DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def prefetch(address: Address = None, as_json: AsJson = False) -> None:
    """Show the prefetch queue: what each client needs soon, what is under way, and how often host memory had it."""
    question = Question(
        call=lambda store, _: store.GetPrefetch(admin_pb.GetPrefetchRequest(), timeout=WALK_DEADLINE_SECONDS),
        show=tables.prefetch_tables,
        total=totals.prefetch,
    )
    run(address, question, as_json=as_json)
