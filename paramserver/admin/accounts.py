"""The verb `paramserver-admin accounts`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from paramserver.admin import printers
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.v1 import store_admin_pb2 as admin_pb

POLL_SECONDS = 0.05


def accounts(
    address: Address = None,
    as_json: AsJson = False,
    wait: Annotated[
        float, typer.Option(help="How many seconds to wait for an instant at which nothing is under way.", min=0.0)
    ] = 10.0,
) -> None:
    """Show who holds the used bytes of each tier.

    The exit status is 1 if at no time during the wait did jobs, readers and sessions explain every used byte. What they
    do not explain was leaked.
    """
    deadline = time.monotonic() + wait
    with connect(address) as store:
        while True:
            response = store.GetAccounts(admin_pb.GetAccountsRequest(), timeout=DEADLINE_SECONDS)
            is_settled = all(account.settled for account in response.accounts)
            if is_settled or time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        if as_json:
            printers.print_json(response)
        else:
            printers.console().print(printers.accounts_table(response))
    raise typer.Exit(0 if is_settled else 1)
