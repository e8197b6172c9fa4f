"""The verb `paramserver-admin accounts`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from paramserver.admin import tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.exit_codes import ExitCode
from paramserver.admin.nodes import Question, run
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

    The exit status is 1 if at no time during the wait did jobs, readers and sessions explain every used byte. The
    remaining bytes were leaked.
    """

    def read(store: Any, _: str) -> admin_pb.GetAccountsResponse:
        deadline = time.monotonic() + wait
        while True:
            response = store.GetAccounts(admin_pb.GetAccountsRequest(), timeout=DEADLINE_SECONDS)
            if _is_settled(response) or time.monotonic() >= deadline:
                assert isinstance(response, admin_pb.GetAccountsResponse)
                return response
            time.sleep(POLL_SECONDS)

    question = Question(
        call=read,
        show=tables.accounts_table,
        total=totals.accounts,
        verdict=lambda response: ExitCode.DONE if _is_settled(response) else ExitCode.FAILED,
    )
    run(address, question, as_json=as_json)


def _is_settled(response: admin_pb.GetAccountsResponse) -> bool:
    return all(account.settled for account in response.accounts)
