"""The verbs `paramserver-admin evict` and `promote`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from paramserver.admin import printers, totals
from paramserver.admin.completion import Job, job_names
from paramserver.admin.connection import KEEPING_DEADLINE_SECONDS, Address, AsJson, Yes, confirm, fail
from paramserver.admin.nodes import Question, run
from paramserver.contract.sizes import shown_size
from paramserver.v1 import store_admin_pb2 as admin_pb


def evict(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=job_names)] = "",
    all_jobs: Annotated[bool, typer.Option("--all", help="All jobs, instead of one.")] = False,
    address: Address = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Evict the copies of a job in host memory that are not in use. No byte is lost, but reads have to fetch it again.

    Copies whose home is host memory stay.
    """
    if all_jobs == bool(job):
        fail("name a job, or give --all")
    whose = "all jobs" if all_jobs else f"job {job!r}"
    confirm(f"Evict the copies of {whose} in host memory? Its next reads come from NVMe.", yes=yes)
    request = admin_pb.EvictCopiesRequest(job=job, all_jobs=all_jobs)
    question = Question(
        call=lambda store, _: store.EvictCopies(request, timeout=KEEPING_DEADLINE_SECONDS),
        show=_evicted,
        total=totals.figures,
    )
    run(address, question, as_json=as_json)


def _evicted(result: admin_pb.EvictCopiesResponse) -> Text:
    left = f"; {shown_size(result.left_bytes)} are in use or at home in host memory" if result.left_bytes else ""
    return printers.text(f"evicted {result.copies} copies, {shown_size(result.bytes)}{left}")


def promote(job: Job, address: Address = None, as_json: AsJson = False) -> None:
    """Bring the newest bytes of a job into host memory, as far as there is free room. Nothing is evicted for it."""
    request = admin_pb.PromoteJobRequest(job=job)
    question = Question(
        call=lambda store, _: store.PromoteJob(request, timeout=KEEPING_DEADLINE_SECONDS),
        show=_promoted,
        total=totals.figures,
    )
    run(address, question, as_json=as_json)


def _promoted(result: admin_pb.PromoteJobResponse) -> Text:
    left = f"; {shown_size(result.left_bytes)} found no room or are being written" if result.left_bytes else ""
    present = f"; {shown_size(result.present_bytes)} were there" if result.present_bytes else ""
    return printers.text(f"brought {result.slabs} slabs, {shown_size(result.bytes)}, into host memory{present}{left}")
