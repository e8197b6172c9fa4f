"""The verb `paramserver export`: its options, its progress and its result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from paramserver.contract.address import ADDRESS_VARIABLE
from paramserver.contract.printable import printable
from paramserver.contract.sizes import Size, shown_size
from trainer_client.client.transport.credentials import (
    TLS_CA_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    TOKEN_FILE_VARIABLE,
    Credentials,
)
from trainer_client.errors import ConfigError
from trainer_client.exchange.export import ExportResult, Format, WeightDType, export_step
from trainer_client.exchange.terminal import COMMAND, cleaning_up_on_sigterm, exit_statuses, progress_bar, required

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def export(
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Directory, or a URL that fsspec knows.")],
    job: Annotated[str, typer.Option(help="Name of the job.")],
    step: Annotated[int | None, typer.Option(min=0, help="Number of the step; without it, the newest one.")] = None,
    kept: Annotated[str | None, typer.Option(help="Name of a kept step, instead of --step.")] = None,
    format: Annotated[Format, typer.Option(help="Format of the files.")] = "safetensors",
    dtype: Annotated[
        WeightDType | None,
        typer.Option(
            help="Type of the parameters, from the fp32 weights; without it, safetensors as trained, else fp32."
        ),
    ] = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="With dcp: the optimizer's states, too.")] = False,
    adapter: Annotated[
        str | None, typer.Option(help="Name of a LoRA adapter of peft, which alone is written; usually default.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of tensors in one file; not for dcp.")] = "5GB",
    extra: Annotated[
        list[Path] | None,
        typer.Option("--with", help="File, or directory of files, to copy beside the weights; may be repeated."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is at DEST.")] = False,
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="unix:/path/paramserver.sock or HOST:PORT; may be repeated, for each store of the job.",
            envvar=ADDRESS_VARIABLE,
        ),
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
    """Write a committed step of a job as files that other frameworks open.

    The export reads from the store alone, while training goes on. DEST is complete, or not there at all.

    Exit status: 0 when the export is complete, 2 for wrong options, 130 after Ctrl-C, 143 after SIGTERM, else 1.
    """
    with exit_statuses(f"nothing is left at {destination}"), cleaning_up_on_sigterm(), progress_bar("export") as bar:
        result = export_step(
            required(address),
            job,
            step,
            destination,
            format=format,
            dtype=dtype,
            optimizer=optimizer,
            adapter=adapter,
            max_shard_bytes=_size(max_shard_size),
            extra_files=extra or (),
            overwrite=overwrite,
            credentials=Credentials(
                token_file=token_file,
                tls_ca=tls_ca,
                tls_certificate=tls_certificate,
                tls_key=tls_key,
                insecure=insecure,
            ),
            kept=kept,
            on_progress=bar,
        )
    _print(result, as_json=as_json)


def main(arguments: list[str], command: str = "paramserver") -> None:
    """Run the verb of `command` with these arguments, and end the process with its exit status."""
    COMMAND.set(command)
    app(arguments, prog_name=f"{command} export")


def _print(result: ExportResult, *, as_json: bool) -> None:
    if result.left_out:
        names = ", ".join(map(printable, result.left_out))
        typer.echo(
            f"{COMMAND.get()}: the store does not have these entries of the model's state dict: {names}", err=True
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result) | {"size_bytes": result.size_bytes}))
        return
    files = f"{len(result.files)} files" if len(result.files) > 1 else "1 file"
    typer.echo(
        f"{printable(result.destination)}: step {result.step} of {printable(result.job)}, {result.tensors} tensors, "
        f"{shown_size(result.size_bytes)} in {files} as {result.format}, {result.seconds:.1f} s"
    )


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(Size).validate_python(text))
    except ValidationError:
        raise ConfigError(f"--max-shard-size {text!r} is not a size: write for example 5GB or 512MiB") from None
