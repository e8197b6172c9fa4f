"""The `paramserver` command: runs a store daemon, makes certificates and tokens, and calls the verbs of its clients.

The verbs that are clients of a daemon belong to the package `trainer_client`, which lies above this one. This module
knows their names and one line of help; a verb is found and imported when it is called, so that neither the daemon nor
`--help` needs it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from paramserver import __version__
from paramserver.build import read_build, read_commit
from paramserver.config import DaemonConfig, load_config
from paramserver.contract.client_verbs import VerbError, load_verb
from paramserver.errors import ConfigError
from paramserver.security import cli as security_cli

app = typer.Typer(
    help="A node's store for the training state of models larger than GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command()(security_cli.certs)
app.add_typer(security_cli.tokens, name="tokens")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paramserver {__version__}, commit {read_commit()}, build {read_build()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print version, commit and build."),
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            help='TOML file with the keys below (host_budget = "8GiB"). Variables such as '
            "PARAMSERVER_SERVE_HOST_BUDGET win over it, and flags over both."
        ),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Directory for catalog, data, lock and socket.")] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Shared memory of the host tier, taken at start. [1GiB]")
    ] = None,
    nvme_budget: Annotated[str | None, typer.Option(help="Most bytes on the nvme tier. [64GiB]")] = None,
    lend_budget: Annotated[
        str | None, typer.Option(help="Most bytes of host_budget that other daemons may borrow. [0]")
    ] = None,
    nvme_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Directory of a data file, best one on each device; may be repeated. [STATE_DIR]"),
    ] = None,
    socket: Annotated[Path | None, typer.Option(help="UNIX socket. [STATE_DIR/paramserver.sock]")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT for TCP besides the UNIX socket. [none]")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Allow TCP beyond loopback without TLS.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM certificate for TCP. [none: no TLS]")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="PEM authorities that sign clients.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File of `paramserver tokens`; every call needs one.")] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT of the HTTP endpoint with /metrics and the page. [none]")
    ] = None,
    page: Annotated[
        bool | None, typer.Option("--page/--no-page", help="Serve the page for people beside /metrics. [--page]")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="http://HOST:4317 of an OpenTelemetry collector, for spans of steps. [none]")
    ] = None,
    health_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT of the health service alone, without TLS, for probes. [none]")
    ] = None,
    huge_pages: Annotated[
        bool | None, typer.Option("--huge-pages", help="Shared memory in pages of 2 MiB where there are enough.")
    ] = None,
    lock_memory: Annotated[
        bool | None, typer.Option("--lock-memory", help="Never swap shared memory out, where that is allowed.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. [info]")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json. [console]")] = None,
    exit_with_stdin: Annotated[
        bool, typer.Option("--exit-with-stdin", help="Stop when standard input ends, as when the parent process dies.")
    ] = False,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Exit status: 0 after a clean stop, 2 for a bad configuration, 1 for other errors.
    """
    flags = {
        "state_dir": state_dir,
        "host_budget": host_budget,
        "nvme_budget": nvme_budget,
        "lend_budget": lend_budget,
        "nvme_dirs": nvme_dir or None,
        "socket": socket,
        "listen": listen,
        "insecure": insecure,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "token_file": token_file,
        "metrics_listen": metrics_listen,
        "page": page,
        "otlp_endpoint": otlp_endpoint,
        "health_listen": health_listen,
        "huge_pages": huge_pages,
        "lock_memory": lock_memory,
        "log_level": log_level,
        "log_format": log_format,
    }

    def read_config() -> DaemonConfig:
        return load_config(config, flags, os.environ)

    try:
        settings = read_config()
    except ConfigError as error:
        _tell_why(f"{error}")
        raise typer.Exit(2) from None
    from storage.base.tune_interpreter import exempt_from_collection, tune_interpreter

    tune_interpreter()
    import uvloop

    from paramserver.contract.malloc_settings import keep_chunk_buffers
    from paramserver.process.logs import configure_logging
    from paramserver.server import serve as serve_until_stopped
    from storage.base.errors import StorageError

    exempt_from_collection()
    keep_chunk_buffers()
    configure_logging(settings.log_level, settings.log_format)
    try:
        uvloop.run(serve_until_stopped(settings, read_config, exit_with_stdin=exit_with_stdin))
    except ConfigError as error:
        _tell_why(f"bad configuration: {error}")
        raise typer.Exit(2) from None
    except (StorageError, OSError) as error:
        _tell_why(f"{error}")
        raise typer.Exit(1) from None


def _tell_why(reason: str) -> None:
    """Print on stderr why the command ends. If stderr is a file on a full disk, print it on standard output."""
    try:
        typer.echo(f"paramserver: {reason}", err=True)
    except OSError:
        typer.echo(f"paramserver: {reason}")


@app.command()
def adopt(
    state_dir: Annotated[Path, typer.Option(help="The copy of a state directory, which is to be used from now on.")],
    nvme_dir: Annotated[list[Path], typer.Option(help="Directory of a data file; give each one of the store.")],
) -> None:
    """Give the data directories of a store to a copy of its state directory.

    A copy (a restored backup, or a directory that was moved to another file system) names the data files of its
    original. `serve` refuses it, because two stores must never write into one data file. After this command `serve`
    refuses the original instead. Bytes that the original wrote after the copy was made are lost or damaged; damage is
    detected when the bytes are read.
    """
    from storage.base.errors import StorageError
    from storage.jobs.directories import adopt as adopt_directories

    try:
        asyncio.run(adopt_directories(state_dir, nvme_dir))
    except StorageError as error:
        typer.echo(f"paramserver: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{', '.join(map(str, nvme_dir))}: now of {state_dir}")


def _call_client_verb(name: str, *arguments: object) -> None:
    """Import a verb of the package `trainer_client`, for example `export`, and call it with the arguments.

    If no installed package has the verb, this prints why and ends the program.
    """
    from storage.base.tune_interpreter import exempt_from_collection

    try:
        verb = load_verb(name)
    except VerbError as error:
        _tell_why(f"{error}")
        raise typer.Exit(1) from None
    exempt_from_collection()
    verb(*arguments)


# Typer does not parse the arguments of a client's verb such as `launch`. The verb parses them itself, also --help.
_UNPARSED = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


@app.command(add_help_option=False, context_settings=_UNPARSED)
def export(context: typer.Context) -> None:
    """Write a committed step of a job as safetensors, torch's DCP, or DeepSpeed's fp32 file."""
    _call_client_verb("export", context.args)


@app.command("import", add_help_option=False, context_settings=_UNPARSED)
def import_checkpoint(context: typer.Context) -> None:
    """Write safetensors, a state dict, torch's DCP, or a ZeRO checkpoint of DeepSpeed into the store as a new job."""
    _call_client_verb("import", context.args)


@app.command(add_help_option=False, context_settings=_UNPARSED)
def launch(context: typer.Context) -> None:
    """Start a training script on one or several ranks, with a store daemon if it needs one."""
    _call_client_verb("launch", context.args)


@app.command(add_help_option=False, context_settings=_UNPARSED)
def plan(context: typer.Context) -> None:
    """Say how many bytes a job takes on each tier and rank, whether it fits, and what bounds its step."""
    from paramserver.device_reads import find_hits
    from paramserver.store_need import find_need

    # The planner belongs to the client, which cannot compute what a store needs. So it gets the daemon's functions for
    # it.
    _call_client_verb("plan", context.args, find_need, find_hits)


def main() -> None:
    """Run the command `paramserver` with the arguments of the process."""
    app()
