"""The commands `paramserver certs` and `paramserver tokens`: what a daemon's `tls_*` and `token_file` keys point to."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paramserver.errors import ConfigError

DEFAULT_HOSTS = ["localhost", "127.0.0.1", "::1"]

TokenFileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="TOML file of tokens.")]


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the files; made if need be.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address by which clients reach the daemon; may be repeated. [localhost, 127.0.0.1, ::1]"
        ),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="Name of a client's certificate; may be repeated. [client]")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificates are valid.")] = 90,
) -> None:
    """Make a certificate authority and certificates: for tests and for small private clusters.

    Writes ca.pem, server.pem and CLIENT.pem, each with its -key.pem. An existing authority is kept and signs the new
    certificates. Run the command again to renew them; running daemons notice that. The holder of ca-key.pem can let any
    client in, so keep it off the nodes. If you have a PKI, use its certificates instead.
    """
    from paramserver.security.certificates import make_certificates

    with _one_line_errors():
        for path in make_certificates(directory, host or DEFAULT_HOSTS, client or ["client"], days):
            typer.echo(path)


tokens = typer.Typer(
    help="Add, list and remove the tokens of a daemon's token_file.", no_args_is_help=True, rich_markup_mode=None
)


@tokens.command()
def add(
    path: TokenFileArgument,
    name: Annotated[str, typer.Option(help="Name of the token, for logs and for `remove`; it is not secret.")],
    admin: Annotated[bool, typer.Option("--admin", help="All rights.")] = False,
    job: Annotated[
        list[str] | None, typer.Option(help="Job name or pattern (team-a-*) that it may use; may be repeated.")
    ] = None,
    borrow: Annotated[
        bool, typer.Option("--borrow", help="Another daemon may borrow host memory with it, and do nothing else.")
    ] = False,
    delete: Annotated[bool, typer.Option("--delete", help="It may also delete these jobs.")] = False,
    expires: Annotated[
        datetime.datetime | None, typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M"], help="UTC. [never]")
    ] = None,
) -> None:
    """Make a token, add its hash to the file, and print the token, which cannot be shown again."""
    from paramserver.security.principals import Role
    from paramserver.security.tokens import add_token

    if admin + bool(job) + borrow != 1:
        typer.echo("paramserver: give one of --admin, --job NAME and --borrow", err=True)
        raise typer.Exit(2)
    if delete and not job:
        typer.echo("paramserver: --delete goes with --job NAME; an admin may delete every job", err=True)
        raise typer.Exit(2)
    role = Role.ADMIN if admin else Role.BORROWER if borrow else Role.JOB
    utc = None if expires is None else expires.replace(tzinfo=datetime.UTC)
    with _one_line_errors():
        typer.echo(add_token(path, name, role, job or (), utc, delete=delete))


@tokens.command("list")
def list_tokens(path: TokenFileArgument) -> None:
    """Show names, rights and expiry dates."""
    from paramserver.security.principals import Role
    from paramserver.security.tokens import read_entries

    with _one_line_errors():
        for entry in read_entries(path):
            until = "never expires" if entry.expires is None else f"expires {entry.expires:%Y-%m-%d %H:%M %Z}"
            rights = ", ".join(entry.jobs) or ("everything" if entry.role is Role.ADMIN else "borrows host memory")
            rights += "; may delete" if entry.delete else ""
            typer.echo(f"{entry.name}: {entry.role} ({rights}), {'expired' if entry.expired else until}")


@tokens.command()
def remove(path: TokenFileArgument, name: Annotated[str, typer.Option(help="The name that `list` shows.")]) -> None:
    """Remove a token. Running daemons refuse it within seconds, and end the sessions that it has opened."""
    from paramserver.security.tokens import remove_token

    with _one_line_errors():
        remove_token(path, name)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        typer.echo(f"paramserver: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"paramserver: {error}", err=True)
        raise typer.Exit(1) from None
