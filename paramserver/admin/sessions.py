"""The verb `paramserver-admin sessions`."""

from __future__ import annotations

from paramserver.admin import tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def sessions(address: Address = None, as_json: AsJson = False) -> None:
    """Show every connected client: what it trains, what it holds, and when the daemon heard from it last."""
    question = Question(
        call=lambda store, _: store.ListSessions(admin_pb.ListSessionsRequest(), timeout=DEADLINE_SECONDS),
        show=lambda response: tables.sessions_table(response.sessions),
        total=totals.sessions,
    )
    run(address, question, as_json=as_json)
