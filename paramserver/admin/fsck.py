"""The verb `paramserver-admin fsck`, which needs no daemon."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paramserver.admin import printers
from paramserver.admin.connection import AsJson, fail, interruptible
from paramserver.admin.exit_codes import ExitCode
from paramserver.contract.printable import printable
from paramserver.contract.progress_bars import byte_bars
from paramserver.contract.sizes import shown_size


def fsck(
    state_dir: Annotated[
        Path | None, typer.Argument(metavar="STATE_DIR", help="The state directory, which no daemon uses.")
    ] = None,
    state_dir_option: Annotated[
        Path | None, typer.Option("--state-dir", metavar="STATE_DIR", help="The same, as `paramserver serve` has it.")
    ] = None,
    nvme_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Directory of a data file that is not where the catalog saw it last; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a state directory without a daemon: its catalog, its data files and every committed byte.

    The exit status is 4 if the catalog or a data file is damaged, and 1 if they cannot be checked, for example because
    a daemon uses them. Data files are only read.
    """
    if (state_dir is None) == (state_dir_option is None):
        fail("give the state directory once: as STATE_DIR, or as --state-dir STATE_DIR")
    directory = state_dir or state_dir_option or Path()
    # The modules of `storage` import torch, which takes a second. Only the verb `fsck` needs torch, so it imports them
    # here.
    from storage.base.errors import DataLossError, StorageError
    from storage.fsck import StateCheck, check_state

    check = StateCheck()
    try:
        with interruptible(), byte_bars() as show:
            for check in check_state(directory, nvme_dir or ()):
                show("fsck", check.verified_bytes, check.total_bytes)
    except DataLossError as error:
        check.problems.append(str(error))
    except StorageError as error:
        typer.echo(f"paramserver-admin: {printable(error)}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    with interruptible():
        if as_json:
            printers.print_json({"state_dir": str(directory.absolute()), **asdict(check)})
        else:
            what = f"{check.jobs} jobs, {check.kept_steps} kept steps, {check.versions} versions, "
            out = printers.console()
            for problem in check.problems:
                out.print(printers.text(problem, "red"))
            verdict = f"{len(check.problems)} problems" if check.problems else "no damage"
            out.print(printers.text(f"{what}{shown_size(check.verified_bytes)} verified: {verdict}"))
    raise typer.Exit(ExitCode.BAD_STATE if check.problems else ExitCode.DONE)
