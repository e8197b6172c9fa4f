"""The verb `paramserver-admin tiers`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.live import Live

from paramserver.admin import printers
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.v1 import store_admin_pb2 as admin_pb


def tiers(
    address: Address = None,
    as_json: AsJson = False,
    watch: Annotated[float | None, typer.Option(help="Read again every SECONDS, until Ctrl-C.", min=0.1)] = None,
) -> None:
    """Show use, traffic and hit rate of every tier."""
    with connect(address) as store:
        if watch is None:
            response = store.GetTiers(admin_pb.GetTiersRequest(), timeout=DEADLINE_SECONDS)
            if as_json:
                printers.print_json(response)
            else:
                printers.console().print(printers.tiers_table(response))
            return
        readings = store.WatchTiers(admin_pb.WatchTiersRequest(interval_seconds=watch))
        if as_json:
            for response in readings:
                printers.print_json(response)
            return
        with Live(console=printers.console(), auto_refresh=False) as live:
            for response in readings:
                live.update(printers.tiers_table(response), refresh=True)
