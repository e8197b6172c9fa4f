"""The admin tool's connection to a daemon, whose errors end the program with one line and an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import grpc
import typer

from paramserver import __version__
from paramserver.admin.exit_codes import ExitCode
from paramserver.contract.address import ADDRESS_VARIABLE, check_daemon, is_loopback, is_socket
from paramserver.contract.channel import TlsFiles, channel_to
from paramserver.contract.client_verbs import VerbError, load_verb
from paramserver.contract.printable import printable
from paramserver.contract.sockets import with_real_paths
from paramserver.contract.token_files import token_in
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub

DEADLINE_SECONDS = 10.0
# The deadline of a deletion, which waits for the commit under way. The commit may wait for a device until
# device_timeout_seconds.
DELETION_DEADLINE_SECONDS = 600.0
# The deadline of a call for which the daemon visits all shards of a large job. It is long, because the daemon serves
# its clients at the same time and takes seconds for such a call.
WALK_DEADLINE_SECONDS = 60.0
# The deadline of a call that keeps a step. It is long, because the daemon first writes those bytes of the step to NVMe
# that it has in host memory only.
KEEPING_DEADLINE_SECONDS = 600.0

ADDRESS_MISSING = f"give the daemon's address with --address or ${ADDRESS_VARIABLE}"

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="unix:/path/paramserver.sock or HOST:PORT; several with commas between them, or @FILE with one on a line.",
        envvar=ADDRESS_VARIABLE,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


class UnreachableError(Exception):
    """No daemon can be at an address of this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminCredentials:
    """The token and TLS files for calls to a daemon, as the options before the verb name them."""

    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    def channel(self, address: str) -> grpc.Channel:
        """Return a channel to the daemon at `address`.

        Raises:
            UnreachableError: the directory of the socket cannot be used.
            typer.Exit: the address or a file cannot be used, or the token would cross the network unencrypted. This
                method has printed the reason.
        """
        token = None if self.token_file is None else _read_token(self.token_file)
        local = is_socket(address)
        tls = [path for path in (self.tls_ca, self.tls_key, self.tls_certificate) if path is not None]
        if tls and len(tls) < 3:
            fail("TLS needs all of --tls-ca, --tls-certificate and --tls-key")
        files = _read_tls(*tls) if tls and not local else None
        if token is not None and not (files or local or self.insecure or is_loopback(address)):
            fail(f"a token for {address} would cross the network in the clear: give --tls-ca and so on, or --insecure")
        try:
            return channel_to(check_daemon(address), tls=files, token=token)
        except ValueError as error:
            fail(f"address {address!r}: {error}")
        except OSError as error:
            raise UnreachableError(
                f"no daemon answers at {address}; the directory of its socket cannot be used: {error.strerror}"
            ) from error


# The credentials that the user gave in options before the verb. `admin.cli` sets this variable, and `channel_for` reads
# it.
CREDENTIALS: ContextVar[AdminCredentials] = ContextVar("credentials")


@contextlib.contextmanager
def connect(address: str) -> Iterator[StoreAdminStub]:
    """Yield a stub for the daemon at `address`. A failed call in the block prints one line and exits with status 1."""
    with connected_channel(address) as channel:
        yield StoreAdminStub(channel)


@contextlib.contextmanager
def connected_channel(address: str) -> Iterator[grpc.Channel]:
    """Yield a channel to the daemon at `address`. A failed call in the block prints one line and exits with 1."""
    try:
        channel = channel_for(address)
    except UnreachableError as error:
        fail(str(error))
    try:
        with interruptible():
            yield channel
    except grpc.RpcError as error:
        typer.echo(f"paramserver-admin: {printable(explained(error, address))}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None
    finally:
        channel.close()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the program with ExitCode.INTERRUPTED at Ctrl-C, or if the program that reads the output has ended.

    It ends with ExitCode.FAILED if the output cannot be written, for example to a full disk.
    """
    try:
        yield
    except (BrokenPipeError, KeyboardInterrupt):
        # The program that reads this command's output may have ended (`| head`), so no output is written from here on.
        _drop_output()
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except OSError as error:
        # A failed call to the daemon raises grpc.RpcError, so an OSError means that the output could not be written.
        _drop_output()
        typer.echo(f"paramserver-admin: the output cannot be written: {error.strerror}", err=True)
        raise typer.Exit(ExitCode.FAILED) from None


def _drop_output() -> None:
    """Send the standard output to /dev/null from here on, so that the flush at the interpreter's end cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def channel_for(address: str) -> grpc.Channel:
    """Return a channel to a daemon with the token and TLS files that the options before the verb name."""
    return CREDENTIALS.get().channel(address)


def explained(error: grpc.RpcError, address: str) -> str:
    """Return one line of text that says which status a failed call has and what the status means.

    The line may quote names that clients chose, so callers escape it before they print it.
    """
    # grpc raises only RpcErrors that are a grpc.Call, too. The type stubs do not say so, so mypy needs this assertion.
    assert isinstance(error, grpc.Call)
    details = with_real_paths(error.details() or "")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        details = f"no daemon answers at {address}; is it running, and is the address right? ({details})"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        details = f"the daemon at {address} does not know this call; upgrade it to {__version__}, which this tool has"
    return f"{error.code().name}: {details}"


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is destroyed, unless `yes`. A no, or no answer at all, ends the program with FAILED.

    The question goes to the standard error, because the standard output may be a file or another program.
    """
    if yes:
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            typer.confirm(printable(question), abort=True)
    except typer.Abort as abort:
        # At Ctrl-C, typer.confirm raises Abort as it does when the user answers no. The Abort's context tells the two
        # apart.
        if isinstance(abort.__context__, KeyboardInterrupt):
            typer.echo("\nparamserver-admin: interrupted; nothing was done", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        if not sys.stdin.isatty():
            typer.echo("\nparamserver-admin: nothing was done; without a terminal, agree with --yes", err=True)
            raise typer.Exit(ExitCode.FAILED) from None
        raise


def _read_token(path: Path) -> str:
    token = token_in(_read(path))
    if token is None:
        fail(f"token file {path} must hold one token, as `paramserver tokens add` prints it")
    return token


def _read_tls(authorities: Path, key: Path, certificate: Path) -> TlsFiles:
    try:
        return TlsFiles.read(authorities, key, certificate)
    except OSError as error:
        fail(f"cannot read {error.filename}: {error.strerror}")
    except ValueError as error:
        fail(str(error))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")


def client_verb(name: str) -> Callable[..., Any]:
    """Return the function of a verb that reads or writes tensors of a job, for example `copy`.

    Such verbs are not part of this package. If no installed package has the verb, this ends the program.
    """
    try:
        return load_verb(name)
    except VerbError as error:
        end_because(error)


def end_because(error: VerbError) -> NoReturn:
    """Print why a verb was not carried out, and end the program with the exit status for that error."""
    typer.echo(f"paramserver-admin: {printable(str(error))}", err=True)
    raise typer.Exit(ExitCode.USAGE if error.is_usage else ExitCode.FAILED)


def fail(message: str) -> NoReturn:
    """Print what is wrong with the command line or with a file that it names, and end the program with USAGE."""
    typer.echo(f"paramserver-admin: {printable(message)}", err=True)
    raise typer.Exit(ExitCode.USAGE)
