"""The store of a launch: a daemon that runs already, or that the launch starts, or that the ranks start.

This module chooses between the three. It must never stop a daemon that it did not start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.contract.address import ADDRESS_VARIABLE
from paramserver.contract.documents import parse_toml
from paramserver.contract.places import check_place
from trainer_client.client.transport.channel import check_address, is_serving, open_channel, wait_until_serving
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import ConfigError, StoreUnavailableError
from trainer_client.training.run.local_daemon import SOCKET_NAME, LocalDaemon

# The most seconds for which the launcher waits until an operator's daemon answers. A daemon that was started shortly
# before may still be checking its files.
_SERVING_SECONDS = 30.0
_PROBE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDaemon:
    """A daemon that the launch starts, unless a daemon already serves at the same socket.

    Attributes:
        state_dir: the daemon's state directory.
        address: the address of the daemon's socket, as `unix:/path`.
        options: the options of `paramserver serve`.
    """

    state_dir: Path
    address: str
    options: Sequence[str]

    @classmethod
    def of(cls, config: Path | None, flags: Mapping[str, str | None]) -> OwnDaemon | None:
        """Return the daemon that a TOML file and the flags of `paramserver serve` describe; None if neither is given.

        Raises:
            ConfigError: the file cannot be read, or no state directory is given that can be used.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        if config is None and not given:
            return None
        keys = {} if config is None else _read(config)
        directory = given.get("state-dir", keys.get("state_dir"))
        if not isinstance(directory, str):
            where = "" if config is None else f", and {config} has no state_dir"
            raise ConfigError(f"the daemon's state directory is not given{where}: give --state-dir DIRECTORY")
        try:
            state_dir = check_place(Path(directory)).absolute()
        except ValueError as error:
            raise ConfigError(f"state directory {directory!r}: {error}") from None
        socket = keys.get("socket")
        path = state_dir / SOCKET_NAME if socket is None else Path(str(socket)).absolute()
        # The socket is given as a flag, because an environment variable may name another socket, and a flag wins over
        # that variable.
        options = ["--socket", str(path), *([] if config is None else ["--config", str(config.absolute())])]
        options += [word for name, value in given.items() if name != "state-dir" for word in (f"--{name}", value)]
        return cls(
            state_dir=state_dir,
            address=check_address(f"unix:{path}"),
            options=[*options, "--state-dir", str(state_dir)],
        )

    def is_serving(self) -> bool:
        """Return whether a daemon already serves at this daemon's socket, so that the launch need not start one."""
        try:
            with open_channel(self.address) as channel:
                return is_serving(channel, timeout_seconds=_PROBE_SECONDS)
        except StoreUnavailableError:
            return False

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Start the daemon for a `with` block, unless one already serves at its socket. Yield whether it was started.

        Raises:
            LocalDaemonError: the daemon cannot be started.
        """
        if self.is_serving():
            yield False
            return
        daemon = LocalDaemon(self.state_dir, self.options, address=self.address)
        try:
            yield True
        finally:
            daemon.stop()


def check_operators_daemon(address: str, credentials: Credentials) -> None:
    """Wait until the daemon at an address that the user has given serves.

    Raises:
        ConfigError: the address is malformed.
        StoreUnavailableError: no daemon serves at the address; the message says what to do.
    """
    wait_until_serving(address, _SERVING_SECONDS, credentials, is_loud=True)


def refuse_two(address: str | None, own: OwnDaemon | None, *, is_from_environment: bool) -> None:
    """Raise ConfigError if the user has given both a running daemon's address and options of a daemon to start."""
    if address is not None and own is not None:
        origin = f"${ADDRESS_VARIABLE}" if is_from_environment else "--address"
        raise ConfigError(
            f"{origin} = {address} names a daemon that runs, and there are options of a daemon to start: remove one"
        )


def _read(path: Path) -> dict[str, Any]:
    """Return the keys and values in a daemon's TOML file, unchecked, because the daemon checks them when it starts."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--daemon-config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--daemon-config {path} is not TOML: {error}") from None
