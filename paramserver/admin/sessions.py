"""The verb `paramserver-admin sessions`."""

from __future__ import annotations

from paramserver.admin import printers
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.v1 import store_admin_pb2 as admin_pb


def sessions(address: Address = None, as_json: AsJson = False) -> None:
    """Show every connected client: what it trains, what it holds, and when the daemon heard from it last."""
    with connect(address) as store:
        response = store.ListSessions(admin_pb.ListSessionsRequest(), timeout=DEADLINE_SECONDS)
        if as_json:
            printers.print_json(response)
        else:
            printers.console().print(printers.sessions_table(response.sessions))
