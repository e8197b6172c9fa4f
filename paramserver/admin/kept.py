"""The verbs `paramserver-admin keep`, `forget` and `kept`."""

from __future__ import annotations

from typing import Annotated

import typer

from paramserver.admin import printers, tables
from paramserver.admin.completion import Job
from paramserver.admin.connection import (
    DEADLINE_SECONDS,
    KEEPING_DEADLINE_SECONDS,
    Address,
    AsJson,
    Yes,
    confirm,
)
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the kept step.")]


def kept(job: Job, address: Address = None, as_json: AsJson = False) -> None:
    """Show the kept steps of a job: their names, their bytes, and what forgetting each of them would free."""
    question = Question(
        call=lambda store, _: store.ListKeptSteps(admin_pb.ListKeptStepsRequest(job=job), timeout=DEADLINE_SECONDS),
        show=lambda response: tables.kept_table(job, response),
    )
    run(address, question, as_json=as_json)


def keep(
    job: Job,
    name: Name,
    step: Annotated[int | None, typer.Option(min=0, help="The step; the newest committed one by default.")] = None,
    note: Annotated[str, typer.Option(help="One line for people, which `kept` shows.")] = "",
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Keep a committed step of a job under a name, whatever the job does later."""
    request = admin_pb.KeepStepRequest(job=job, step=step, name=name, note=note)
    question = Question(
        call=lambda store, _: store.KeepStep(request, timeout=KEEPING_DEADLINE_SECONDS),
        show=lambda response: printers.text(f"kept step {response.kept.step} of job {job} as {name}"),
    )
    run(address, question, as_json=as_json)


def forget(job: Job, name: Name, address: Address = None, as_json: AsJson = False, yes: Yes = False) -> None:
    """Forget a kept step. A checkpoint that refers to it cannot be loaded any more."""
    confirm(f"Forget the kept step {name!r} of job {job!r}? This cannot be undone.", yes=yes)
    request = admin_pb.ForgetStepRequest(job=job, name=name)
    question = Question(
        call=lambda store, _: store.ForgetStep(request, timeout=KEEPING_DEADLINE_SECONDS),
        show=lambda _: printers.text(f"forgot the kept step {name} of job {job}"),
    )
    run(address, question, as_json=as_json)
