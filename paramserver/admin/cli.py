"""The `paramserver-admin` command: the options before the verb, and the list of verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paramserver.admin.accounts import accounts
from paramserver.admin.connection import CREDENTIALS, Credentials
from paramserver.admin.delete_job import delete_job
from paramserver.admin.jobs import jobs
from paramserver.admin.kept import forget, keep, kept
from paramserver.admin.sessions import sessions
from paramserver.admin.shards import shards
from paramserver.admin.tiers import tiers

app = typer.Typer(
    help="Shows what a store daemon holds, tier by tier, job by job, shard by shard, and for whom.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _root(
    token_file: Annotated[
        Path | None, typer.Option(help="File of an admin token.", envvar="PARAMSERVER_TOKEN_FILE")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM authorities of the daemon's certificate.", envvar="PARAMSERVER_TLS_CA")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM certificate of this client.", envvar="PARAMSERVER_TLS_CERTIFICATE")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of it.", envvar="PARAMSERVER_TLS_KEY")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let the token cross the network in the clear.")] = False,
) -> None:
    credentials = Credentials(
        token_file=token_file, tls_ca=tls_ca, tls_certificate=tls_certificate, tls_key=tls_key, insecure=insecure
    )
    CREDENTIALS.set(credentials)


app.command()(tiers)
app.command()(accounts)
app.command()(jobs)
app.command()(shards)
app.command()(sessions)
app.command()(kept)
app.command()(keep)
app.command()(forget)
app.command("delete-job")(delete_job)


def main() -> None:
    """Run the command line."""
    app()
