"""The verbs `paramserver-admin drain` and `undrain`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from paramserver.admin import tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, Yes, confirm
from paramserver.admin.exit_codes import ExitCode
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb

POLL_SECONDS = 0.2


def drain(
    address: Address = None,
    as_json: AsJson = False,
    yes: Yes = False,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Most seconds to wait until the daemon is ready to stop.")
    ] = 600.0,
) -> None:
    """Prepare a daemon for its stop: it accepts no new session, and this waits until no work would be lost.

    A trainer is waited for until it has gone or has committed a step since; a reader until it has closed its steps. The
    exit status is 4 if the daemon is not ready to stop after the wait; it stays drained, and a repeated call waits on.
    """
    confirm("Drain the daemon? It accepts no new session until `undrain` or a restart.", yes=yes)

    def drain_one(store: Any, _: str) -> admin_pb.GetDrainResponse:
        deadline = time.monotonic() + wait
        state = store.Drain(admin_pb.DrainRequest(), timeout=DEADLINE_SECONDS)
        while not state.ready and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            state = store.GetDrain(admin_pb.GetDrainRequest(), timeout=DEADLINE_SECONDS)
        assert isinstance(state, admin_pb.GetDrainResponse)
        return state

    question = Question(
        call=drain_one,
        show=tables.drain_tables,
        total=totals.drain,
        verdict=lambda state: ExitCode.DONE if state.ready else ExitCode.BAD_STATE,
    )
    run(address, question, as_json=as_json)


def undrain(address: Address = None, as_json: AsJson = False) -> None:
    """End the draining of a daemon: it accepts sessions again."""
    question = Question(
        call=lambda store, _: store.Undrain(admin_pb.UndrainRequest(), timeout=DEADLINE_SECONDS),
        show=tables.drain_tables,
        total=totals.drain,
    )
    run(address, question, as_json=as_json)
