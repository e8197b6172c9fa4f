"""The verb `paramserver-admin top`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from paramserver.admin import printers, tables, totals
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson, interruptible
from paramserver.admin.nodes import Question, answer, run
from paramserver.v1 import store_admin_pb2 as admin_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one refresh of `top` shows: the answers of one daemon, or the sums of the answers of several."""

    tiers: admin_pb.GetTiersResponse
    jobs: admin_pb.ListJobsResponse
    sessions: admin_pb.ListSessionsResponse
    prefetch: admin_pb.GetPrefetchResponse


def top(
    address: Address = None,
    as_json: AsJson = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read once and end, for programs.")] = False,
) -> None:
    """Show tiers, devices, queues, jobs, sessions and stalls, again and again, until Ctrl-C.

    With --json, each reading is one line.
    """
    question = Question(call=_read, show=_shown, values=_values, total=_total)
    if once:
        run(address, question, as_json=as_json)
    with interruptible():
        if as_json:
            while True:
                printers.print_json(answer(address, question)[2])
                time.sleep(interval)
        with printers.readings() as show:
            while True:
                show(answer(address, question)[1])
                time.sleep(interval)


def _read(store: Any, _: str) -> Reading:
    return Reading(
        tiers=store.GetTiers(admin_pb.GetTiersRequest(), timeout=DEADLINE_SECONDS),
        jobs=store.ListJobs(admin_pb.ListJobsRequest(), timeout=DEADLINE_SECONDS),
        sessions=store.ListSessions(admin_pb.ListSessionsRequest(), timeout=DEADLINE_SECONDS),
        prefetch=store.GetPrefetch(admin_pb.GetPrefetchRequest(), timeout=DEADLINE_SECONDS),
    )


def _shown(reading: Reading) -> RenderableType:
    return Group(
        tables.tiers_table(reading.tiers),
        tables.devices_table(reading.tiers.tiers),
        tables.jobs_table(reading.jobs.jobs),
        tables.sessions_table(reading.sessions.sessions),
        tables.prefetch_tables(reading.prefetch),
    )


def _values(reading: Reading) -> Any:
    parts = ("tiers", "jobs", "sessions", "prefetch")
    return {part: printers.values_of(getattr(reading, part)) for part in parts}


def _total(readings: Sequence[Reading]) -> Reading:
    return Reading(
        tiers=totals.tiers([reading.tiers for reading in readings]),
        jobs=totals.jobs([reading.jobs for reading in readings]),
        sessions=totals.sessions([reading.sessions for reading in readings]),
        prefetch=totals.prefetch([reading.prefetch for reading in readings]),
    )
