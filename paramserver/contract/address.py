"""The addresses that users write: `unix:/path` or `host:port` for a daemon, `http://host:port` for a collector."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

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
        ValueError: no socket can be at that path; the message says why.
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
        ValueError: the port is missing, or is not a number from 0 to 65535.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT, such as 127.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_daemon(address: str) -> str:
    """Return the address of a daemon, after checking that it is `unix:/path/to.sock` or `host:port`.

    Raises:
        ValueError: it has neither form, or no socket can be at the path.
    """
    if is_socket(address):
        socket_path(address)
        return address
    try:
        port = host_and_port(address)[1]
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("write 'unix:/path/paramserver.sock' or 'host:port'")
    return address


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach `host:port`."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_collector(endpoint: str) -> str:
    """Return the address of a collector, after checking its form.

    Raises:
        ValueError: the address is not `http://HOST:PORT` or `https://HOST:PORT`.
    """
    parts = urlsplit(endpoint)
    # Reading `parts.port` raises ValueError if the address has a port that is not a number, or is above 65535.
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError(f"{endpoint!r} is no address of a collector: write http://HOST:4317 or https://HOST:4317")
    return endpoint


def crosses_a_network_in_the_clear(endpoint: str) -> bool:
    """Return whether a collector is on another machine and its connection is not encrypted."""
    parts = urlsplit(endpoint)
    return parts.scheme == "http" and not is_loopback(f"{parts.hostname}:{parts.port}")
