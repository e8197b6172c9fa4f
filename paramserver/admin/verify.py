"""The verb `paramserver-admin verify`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from paramserver.admin import printers, tables, totals
from paramserver.admin.completion import job_names
from paramserver.admin.connection import Address, AsJson
from paramserver.admin.exit_codes import ExitCode
from paramserver.admin.nodes import Question, run
from paramserver.contract.printable import printable
from paramserver.contract.progress_bars import byte_columns
from paramserver.contract.sizes import shown_size
from paramserver.v1 import store_admin_pb2 as admin_pb

# A function that gets the address of a daemon and a message of its verification; it is called with each message.
_OnProgress = Callable[[str, admin_pb.VerifyResponse], None]


def verify(
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="Name of the job; all jobs if it is left out.", autocompletion=job_names),
    ] = "",
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Read and verify all committed bytes on NVMe now. The exit status is 4 if bytes are damaged.

    Reads and writes of trainers go first. Damage is reported as that which a trainer finds, and its place on the device
    is never used again.
    """
    with _progress() as on_progress:
        question = Question(
            call=lambda store, asked: _verify(store, asked, job, on_progress),
            show=_shown,
            total=_total,
            verdict=lambda result: ExitCode.BAD_STATE if result.damage else ExitCode.DONE,
        )
        run(address, question, as_json=as_json)


def _verify(store: Any, address: str, job: str, on_progress: _OnProgress) -> admin_pb.VerifyResponse:
    """Return the result of a verification: the last progress, with all damage."""
    result = admin_pb.VerifyResponse()
    for progress in store.Verify(admin_pb.VerifyRequest(job=job)):
        result.verified_bytes, result.total_bytes = progress.verified_bytes, progress.total_bytes
        result.damage.extend(progress.damage)
        on_progress(address, progress)
    return result


@contextlib.contextmanager
def _progress() -> Iterator[_OnProgress]:
    """Show a bar for each daemon on standard error if that is a terminal, until the context ends."""
    columns = (BarColumn(), *byte_columns(), TimeRemainingColumn())
    name = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(name, *columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def show(address: str, message: admin_pb.VerifyResponse) -> None:
            if address not in tasks:
                tasks[address] = progress.add_task(printable(address))
            progress.update(tasks[address], completed=message.verified_bytes, total=message.total_bytes)

        yield show


def _shown(result: admin_pb.VerifyResponse) -> RenderableType:
    what = f"verified {shown_size(result.verified_bytes)}"
    if not result.damage:
        return printers.text(f"{what}: no damage")
    line = printers.text(f"{what}: {len(result.damage)} damaged or unreadable places", "red")
    return Group(line, tables.damage_table(result.damage))


def _total(results: Any) -> admin_pb.VerifyResponse:
    total = totals.figures(results)
    for result in results:
        total.damage.extend(result.damage)
    assert isinstance(total, admin_pb.VerifyResponse)
    return total
