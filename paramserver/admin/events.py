"""The verb `paramserver-admin events`."""

from __future__ import annotations

from typing import Annotated

import typer

from paramserver.admin import printers, tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.admin.nodes import Question, only_one, run
from paramserver.events import EventKind
from paramserver.v1 import store_admin_pb2 as admin_pb


def events(
    address: Address = None,
    as_json: AsJson = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=2000, help="Most events, the newest ones.")] = 100,
    kind: Annotated[list[EventKind] | None, typer.Option(help="Only events of this kind; may be repeated.")] = None,
    after: Annotated[int, typer.Option(min=0, help="Only events with a higher number than this.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each new event, until Ctrl-C.")] = False,
) -> None:
    """Show what has happened lately: sessions, jobs, commits, damage, degraded tiers, and verbs of operators."""
    request = admin_pb.ListEventsRequest(limit=limit, after=after, kinds=kind or [])
    if follow:
        _follow(only_one(address, "--follow"), request, as_json)
        return
    question = Question(
        call=lambda store, _: store.ListEvents(request, timeout=DEADLINE_SECONDS),
        show=lambda response: tables.events_table(response.events),
        total=totals.events,
    )
    run(address, question, as_json=as_json)


def _follow(address: str, request: admin_pb.ListEventsRequest, as_json: bool) -> None:
    """Print each event on a line of its own."""
    out = printers.console()
    with connect(address) as store:
        for response in store.WatchEvents(request):
            for event in response.events:
                if as_json:
                    printers.print_json(printers.values_of(event))
                else:
                    out.print(tables.event_line(event), soft_wrap=True)
