"""The verbs `paramserver-admin keep`, `forget` and `kept`."""

from __future__ import annotations

from typing import Annotated

import typer

from paramserver.admin import printers
from paramserver.admin.connection import DEADLINE_SECONDS, KEEPING_DEADLINE_SECONDS, Address, AsJson, connect
from paramserver.v1 import store_admin_pb2 as admin_pb

Job = Annotated[str, typer.Argument(help="Name of the job.")]
Name = Annotated[str, typer.Argument(help="Name of the kept step.")]


def kept(job: Job, address: Address = None, as_json: AsJson = False) -> None:
    """Show the kept steps of a job: their names, their bytes, and what forgetting each of them would free."""
    with connect(address) as store:
        response = store.ListKeptSteps(admin_pb.ListKeptStepsRequest(job=job), timeout=DEADLINE_SECONDS)
        if as_json:
            printers.print_json(response)
        else:
            printers.console().print(printers.kept_table(job, response))


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
    with connect(address) as store:
        response = store.KeepStep(request, timeout=KEEPING_DEADLINE_SECONDS)
        if as_json:
            printers.print_json(response)
        else:
            printers.console().print(printers.text(f"kept step {response.kept.step} of job {job} as {name}"))


def forget(
    job: Job,
    name: Name,
    address: Address = None,
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget a kept step. A checkpoint that refers to it cannot be loaded any more."""
    if not yes:
        typer.confirm(f"Forget the kept step {name!r} of job {job!r}? This cannot be undone.", abort=True)
    with connect(address) as store:
        response = store.ForgetStep(admin_pb.ForgetStepRequest(job=job, name=name), timeout=KEEPING_DEADLINE_SECONDS)
        if as_json:
            printers.print_json(response)
        else:
            printers.console().print(printers.text(f"forgot the kept step {name} of job {job}"))
