"""How the admin tool reaches a daemon, and what it says when it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import grpc
import typer

from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub

ADDRESS_VARIABLE = "PARAMSERVER_ADDRESS"
DEADLINE_SECONDS = 10.0

Address = Annotated[
    str | None,
    typer.Option("--address", help="unix:/path/paramserver.sock or HOST:PORT.", envvar=ADDRESS_VARIABLE),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@contextmanager
def connect(address: str | None) -> Iterator[StoreAdminStub]:
    """A stub for the daemon at `address`. What goes wrong inside ends the program with one line and status 1."""
    if not address:
        typer.echo(f"paramserver-admin: give the daemon's address with --address or ${ADDRESS_VARIABLE}", err=True)
        raise typer.Exit(2)
    channel = grpc.insecure_channel(address)
    try:
        yield StoreAdminStub(channel)
    except grpc.RpcError as error:
        # Every error of a call is a Call too; the stubs do not say so.
        assert isinstance(error, grpc.Call)
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            details = f"no daemon answers at {address}; is it running, and is the address right? ({details})"
        typer.echo(f"paramserver-admin: {error.code().name}: {details}", err=True)
        raise typer.Exit(1) from None
    except (BrokenPipeError, KeyboardInterrupt):
        # The reader of a pipe went away, or the person had enough: both end the output quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(130) from None
    finally:
        channel.close()
