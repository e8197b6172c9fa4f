"""The verb `paramserver import`: its options, its progress and its result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from paramserver.contract.address import ADDRESS_VARIABLE
from paramserver.contract.printable import printable
from paramserver.contract.sizes import shown_size
from trainer_client.client.store_client.types import Placement
from trainer_client.client.transport.credentials import (
    TLS_CA_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    TOKEN_FILE_VARIABLE,
    Credentials,
)
from trainer_client.exchange.export import WeightDType
from trainer_client.exchange.import_checkpoint import ImportResult, import_checkpoint
from trainer_client.exchange.terminal import COMMAND, cleaning_up_on_sigterm, exit_statuses, progress_bar, required

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File or directory of a checkpoint, or a URL that fsspec knows.")
    ],
    job: Annotated[str, typer.Option(help="Name of the job, which must be new.")],
    dtype: Annotated[
        WeightDType | None, typer.Option(help="Type in which the model computes; without it, that of the weights.")
    ] = None,
    device: Annotated[Placement, typer.Option(help="Home of the tensors until a trainer takes over.")] = "nvme",
    durability: Annotated[
        str, typer.Option(help="As paramserver.durability of the trainer: step, snapshot:N, none.")
    ] = "step",
    tag: Annotated[
        str | None, typer.Option(help="For DeepSpeed: tag of the checkpoint; without it, the newest.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out optimizer states and counters, to begin at step 0.")
    ] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Pattern of names of tensors to leave out; may be repeated.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare the files with their checksums first.")
    ] = True,
    address: Annotated[
        str | None, typer.Option(help="unix:/path/paramserver.sock or HOST:PORT.", envvar=ADDRESS_VARIABLE)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON for programs.")] = False,
    token_file: Annotated[Path | None, typer.Option(help="File of a token.", envvar=TOKEN_FILE_VARIABLE)] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM authorities of the daemon's certificate.", envvar=TLS_CA_VARIABLE)
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM certificate of this client.", envvar=TLS_CERTIFICATE_VARIABLE)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of it.", envvar=TLS_KEY_VARIABLE)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let the token cross the network in the clear.")] = False,
) -> None:
    """Write a checkpoint of another framework into a store as a new job, from which a trainer goes on.

    The import reads safetensors, state dicts of torch.save, checkpoints of torch.distributed.checkpoint, and those of
    DeepSpeed's ZeRO stages 1 to 3. The job is complete, or not there at all. Nothing in the files is executed.

    Exit status: 0 when the import is complete, 2 for wrong options, 130 after Ctrl-C, 143 after SIGTERM, else 1.
    """
    with exit_statuses(f"the store has no job {job}"), cleaning_up_on_sigterm(), progress_bar("import") as bar:
        result = import_checkpoint(
            required(address),
            job,
            source,
            dtype=dtype,
            device=device,
            durability=durability,
            tag=tag,
            weights_only=weights_only,
            exclude=exclude or (),
            verify=verify,
            credentials=Credentials(
                token_file=token_file,
                tls_ca=tls_ca,
                tls_certificate=tls_certificate,
                tls_key=tls_key,
                insecure=insecure,
            ),
            on_progress=bar,
        )
    _print(result, as_json=as_json)


def main(arguments: list[str], command: str = "paramserver") -> None:
    """Run the verb of `command` with these arguments, and end the process with its exit status."""
    COMMAND.set(command)
    app(arguments, prog_name=f"{command} import")


def _print(result: ImportResult, *, as_json: bool) -> None:
    if result.left_out:
        names = ", ".join(map(printable, result.left_out))
        typer.echo(f"{COMMAND.get()}: these entries of the checkpoint are not in the job: {names}", err=True)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    states = f" with {', '.join(result.states)}" if result.states else ""
    typer.echo(
        f"{printable(result.job)}: committed as step {result.committed_step}, from step {result.step} of "
        f"{printable(result.source)} ({result.format}), {result.tensors} tensors{states}, "
        f"{shown_size(result.size_bytes)}, {result.seconds:.1f} s"
    )
