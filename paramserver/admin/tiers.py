"""The verb `paramserver-admin tiers`."""

from __future__ import annotations

from typing import Annotated

import typer

from paramserver.admin import printers, tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.admin.nodes import Question, only_one, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def tiers(
    address: Address = None,
    as_json: AsJson = False,
    watch: Annotated[float | None, typer.Option(help="Read again every SECONDS, until Ctrl-C.", min=0.1)] = None,
) -> None:
    """Show use, traffic and hit rate of every tier."""
    if watch is not None:
        _watch(only_one(address, "--watch"), watch, as_json)
        return
    question = Question(
        call=lambda store, _: store.GetTiers(admin_pb.GetTiersRequest(), timeout=DEADLINE_SECONDS),
        show=tables.tiers_table,
        total=totals.tiers,
    )
    run(address, question, as_json=as_json)


def _watch(address: str, interval_seconds: float, as_json: bool) -> None:
    with connect(address) as store:
        readings = store.WatchTiers(admin_pb.WatchTiersRequest(interval_seconds=interval_seconds))
        if as_json:
            for response in readings:
                printers.print_json(printers.values_of(response))
            return
        with printers.readings() as show:
            for response in readings:
                show(tables.tiers_table(response))
