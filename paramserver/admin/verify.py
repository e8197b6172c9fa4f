"""The verb `paramserver-admin verify`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from paramserver.admin import printers, tables, totals
from paramserver.admin.completion import job_names
from paramserver.admin.connection import Address, AsJson
from paramserver.admin.exit_codes import ExitCode
from paramserver.admin.nodes import Question, run
from paramserver.contract.printable import printable
from paramserver.contract.progress_bars import ShowBytes, byte_bars
from paramserver.contract.sizes import shown_size
from paramserver.v1 import store_admin_pb2 as admin_pb


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
    with byte_bars() as show:
        question = Question(
            call=lambda store, asked: _verify(store, asked, job, show),
            show=_shown,
            total=_total,
            verdict=lambda result: ExitCode.BAD_STATE if result.damage else ExitCode.DONE,
        )
        run(address, question, as_json=as_json)


def _verify(store: Any, address: str, job: str, show: ShowBytes) -> admin_pb.VerifyResponse:
    """Verify all bytes of a job, show the progress, and return the last message with the damage of all messages."""
    result = admin_pb.VerifyResponse()
    for progress in store.Verify(admin_pb.VerifyRequest(job=job)):
        result.verified_bytes, result.total_bytes = progress.verified_bytes, progress.total_bytes
        result.damage.extend(progress.damage)
        show(printable(address), progress.verified_bytes, progress.total_bytes)
    return result


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
