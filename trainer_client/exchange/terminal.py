"""The terminal output and the exit statuses of the verbs `paramserver export` and `import`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn, TypeVar

import typer

from paramserver.contract.address import ADDRESS_VARIABLE
from paramserver.contract.printable import printable
from paramserver.contract.progress_bars import byte_bars
from trainer_client.errors import ConfigError, TrainerClientError
from trainer_client.exchange.export import TensorProgress

# A verb takes the address of one daemon, or of several.
AddressT = TypeVar("AddressT", str, list[str])

_WRONG_OPTIONS = 2
# The name of the command that the user has called: `paramserver`, or `paramserver-admin`, which has the same verbs.
# Messages begin with this name. The `main` function of a verb sets this variable.
COMMAND: ContextVar[str] = ContextVar("command", default="paramserver")
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[TensorProgress], None]]:
    """Show a progress bar with a name on the standard error, if that is a terminal."""
    with byte_bars() as show:
        yield lambda progress: show(name, progress.read_bytes, progress.total_bytes)


@contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit within the context, so that the files written so far are removed."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(_TERMINATED)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def exit_statuses(after_interrupt: str) -> Iterator[None]:
    """End the process if an error leaves the context: with 2 for wrong options, 130 after Ctrl-C, else with 1.

    Args:
        after_interrupt: the text that the message shows after Ctrl-C. It says what the interrupted verb has left
            behind.
    """
    try:
        yield
    except KeyboardInterrupt:
        _fail(f"interrupted; {after_interrupt}", _INTERRUPTED)
    except ConfigError as error:
        _fail(str(error), _WRONG_OPTIONS)
    except TrainerClientError as error:
        _fail(str(error), 1)


def required(address: AddressT | None) -> AddressT:
    """Return the value of the option --address. Raise ConfigError if neither option nor environment has one."""
    if not address:
        raise ConfigError(f"give the daemon's address with --address or ${ADDRESS_VARIABLE}")
    return address


def _fail(message: str, status: int) -> NoReturn:
    """Print a message on the standard error, and end the process with a status."""
    typer.echo(f"{COMMAND.get()}: {printable(message)}", err=True)
    raise typer.Exit(status)
