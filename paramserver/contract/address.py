"""The address of a daemon, as users write it: `unix:/path` or `host:port`."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from paramserver.contract.sockets import check_path

# The environment variable with the daemon's address, for trainers and for the admin tool.
ADDRESS_VARIABLE = "PARAMSERVER_ADDRESS"

_UNIX = "unix:"


def is_socket(address: str) -> bool:
    """Return whether the address names a UNIX socket."""
    return address.startswith(_UNIX)


def socket_path(address: str) -> Path:
    """Return the absolute path in `unix:/path` or `unix:///path`.

    Raises:
        ValueError: no socket can be there; the message says why.
    """
    path = address.removeprefix(_UNIX)
    if not path.startswith("/"):
        raise ValueError("write the absolute path of the socket after 'unix:'")
    absolute = Path("/" + path.lstrip("/"))
    check_path(absolute)
    return absolute


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of `host:port`; an IPv6 address is in brackets there.

    Raises:
        ValueError: the port is missing, or no number from 0 to 65535.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, such as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach `host:port`."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
