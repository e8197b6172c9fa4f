"""The verbs `paramserver-admin copy`, `backup` and `restore`.

These verbs read and write tensors of jobs. Their work is done in the package `trainer_client`, which this package must
not import at its start, so a verb is imported when it is called.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paramserver.admin import printers
from paramserver.admin.completion import Job
from paramserver.admin.connection import (
    CREDENTIALS,
    Address,
    AdminCredentials,
    AsJson,
    client_verb,
    end_because,
    interruptible,
)
from paramserver.admin.exit_codes import ExitCode
from paramserver.admin.nodes import only_one
from paramserver.contract.client_verbs import VerbError
from paramserver.contract.printable import printable
from paramserver.contract.progress_bars import byte_bars
from paramserver.contract.sizes import shown_size

Step = Annotated[int | None, typer.Option(min=0, help="The step; the newest committed one by default.")]
Kept = Annotated[str | None, typer.Option(help="Name of a kept step, instead of --step.")]

_UNFINISHED = "the target keeps the unfinished step for an hour; call the verb again to go on with it"


def copy(
    job: Job,
    origin: Annotated[str, typer.Argument(metavar="FROM", help="Address of the daemon that has the step.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Address of the daemon that gets it.")],
    step: Step = None,
    kept: Kept = None,
    to_token_file: Annotated[
        Path | None, typer.Option(help="File of an admin token of TO, if it is not that before the verb.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a committed step of a job to another daemon, bit for bit, so that training can go on from there.

    What TO has of the same bytes is not sent again. TO has the whole step at the end, or nothing of it. A copy that was
    interrupted goes on when it is called again within an hour.
    """
    ours = CREDENTIALS.get()
    theirs = ours if to_token_file is None else replace(ours, token_file=to_token_file)
    result = _call(
        "copy",
        job,
        only_one(origin, "copy"),
        only_one(target, "copy"),
        step=step,
        kept=kept,
        credentials=ours,
        target_credentials=dataclasses.asdict(theirs),
        after_interrupt=_UNFINISHED,
    )
    _print(result, f"copied step {result.step} of job {job} to {target}: {_of_copy(result)}", as_json=as_json)


def backup(
    job: Job,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Directory, or a URL that fsspec knows.")],
    step: Step = None,
    kept: Kept = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Number of newest backups that stay in DEST; all by default.")
    ] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Write a committed step of a job into a backup, while training goes on. A later backup writes what has changed.

    The former backups in DEST stay complete while the new one is written, and are as before if it fails.
    """
    result = _call(
        "backup",
        job,
        only_one(address, "backup"),
        destination,
        step=step,
        kept=kept,
        keep_last=keep_last,
        credentials=CREDENTIALS.get(),
        after_interrupt=f"{destination} has the backups that it had before",
    )
    steps = ", ".join(map(str, result.steps))
    written = (
        f"{shown_size(result.written_bytes)} of {shown_size(result.total_bytes)} written in {result.seconds:.1f} s"
    )
    text = f"backed step {result.step} of job {job} up to {destination}: {written}; its steps are {steps}"
    if result.repaired_slabs:
        text += f"; {result.repaired_slabs} damaged files of former backups were written anew"
    _print(result, text, as_json=as_json)


def restore(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The backup: a directory, or a URL.")],
    step: Annotated[int | None, typer.Option(min=0, help="The step; that of the newest backup by default.")] = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Put a step of a backup into a daemon as the newest step of its job, so that training can go on from there.

    The daemon does not have to be the one from which the backup was made. It has the whole step at the end, or nothing
    of it.
    """
    result = _call(
        "restore",
        job,
        source,
        only_one(address, "restore"),
        step=step,
        credentials=CREDENTIALS.get(),
        after_interrupt=_UNFINISHED,
    )
    _print(result, f"restored step {result.step} of job {job} from {source}: {_of_copy(result)}", as_json=as_json)


def _call(name: str, *arguments: Any, credentials: AdminCredentials, after_interrupt: str, **options: Any) -> Any:
    """Carry a verb out under a progress bar, and return its result.

    Args:
        name: the verb.
        *arguments: what the verb works on.
        credentials: the credentials for the daemon.
        after_interrupt: the text that is shown after Ctrl-C; it says which bytes the target has then.
        **options: the other options of the verb.

    Raises:
        typer.Exit: the verb has failed or was interrupted. This function has printed why.
    """
    verb = client_verb(name)
    try:
        with byte_bars() as show:
            return verb(
                *arguments,
                credentials=dataclasses.asdict(credentials),
                on_progress=lambda progress: show(name, progress.done_bytes, progress.total_bytes),
                **options,
            )
    except KeyboardInterrupt:
        typer.echo(f"paramserver-admin: interrupted; {printable(after_interrupt)}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except VerbError as error:
        end_because(error)


def _of_copy(result: Any) -> str:
    there = result.same_bytes + result.resumed_bytes
    return f"{shown_size(result.sent_bytes)} sent, {shown_size(there)} were there, {result.seconds:.1f} s"


def _print(result: Any, text: str, *, as_json: bool) -> None:
    with interruptible():
        if as_json:
            printers.print_json(dataclasses.asdict(result))
        else:
            printers.console().print(printers.text(text))
