"""The only module that makes channels to a daemon, for trainers, StoreClient and the admin tool.

This module must never let an environment variable redirect a call: many clusters set `http_proxy` for downloads, and
gRPC would send the calls for another node's daemon through that proxy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import grpc
import grpc.aio

from paramserver.contract.address import is_socket, socket_path
from paramserver.contract.bearer import TokenBearer, TraceParent
from paramserver.contract.sockets import grpc_target

Options = Sequence[tuple[str, int | str]]

# The channel options that make calls ignore the proxy in the environment variable `http_proxy`. Modules that make their
# own channels to a daemon pass them, too.
NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)


class TlsFiles(NamedTuple):
    """The certificates and the key with which a client connects over mutual TLS, as PEM bytes.

    Attributes:
        authorities: the certificates of the authorities that sign the daemon's certificate.
        key: the client's private key.
        certificate: the client's certificate.
    """

    authorities: bytes
    key: bytes
    certificate: bytes

    @classmethod
    def read(cls, authorities: Path, key: Path, certificate: Path) -> TlsFiles:
        """Read the files.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is empty, as it may be for a moment while a program writes it. gRPC ends the process with
                SIGABRT if only one of key and certificate is empty (grpcio 1.85.1).
        """
        contents = [(path, path.read_bytes()) for path in (authorities, key, certificate)]
        for path, content in contents:
            if not content:
                raise ValueError(f"{path} is empty, and must hold PEM: write it to another file, and rename that to it")
        return cls(*(content for _, content in contents))


def target_of(address: str) -> str:
    """Return the address in the form in which gRPC connects to it from this process.

    Raises:
        ValueError: no socket can be at the address.
        OSError: the directory of the socket does not exist, or cannot be entered.
    """
    return grpc_target(socket_path(address)) if is_socket(address) else address


def channel_to(
    address: str,
    *,
    options: Options = (),
    tls: TlsFiles | None = None,
    token: str | None = None,
    trace: TraceParent | None = None,
) -> grpc.Channel:
    """Return a channel to the daemon at `unix:/path` or `host:port`. The channel connects when it is first used.

    Args:
        options: gRPC's channel arguments in addition to NO_PROXY.
        tls: used for TCP. A UNIX socket needs none, because the mode of its file says who may connect.
        token: added to the metadata of every call.
        trace: adds the caller's span to the metadata of every call, while it has one.

    Raises:
        ValueError, OSError: see `target_of`.
    """
    target, options = target_of(address), (*NO_PROXY, *options)
    if tls is not None and not is_socket(address):
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*tls), options=options)
    else:
        channel = grpc.insecure_channel(target, options=options)
    bearers = [*([] if token is None else [TokenBearer(token)]), *([] if trace is None else [trace])]
    return grpc.intercept_channel(channel, *bearers) if bearers else channel


def async_channel_to(address: str, *, options: Options = (), tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """Return a channel of grpc.aio to the daemon at `unix:/path` or `host:port`, for calls from an event loop.

    Args:
        options, tls: see `channel_to`. The caller adds its token to the metadata of each call.

    Raises:
        ValueError, OSError: see `target_of`.
    """
    target, options = target_of(address), (*NO_PROXY, *options)
    if tls is not None and not is_socket(address):
        return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(*tls), options=options)
    return grpc.aio.insecure_channel(target, options=options)


def collector_channel(endpoint: str, authorities: Path | None = None) -> grpc.Channel:
    """Return a channel to an OpenTelemetry collector at `http://HOST:PORT`, or encrypted at `https://HOST:PORT`.

    Args:
        authorities: PEM file of the authorities that sign the collector's certificate. None if gRPC's own list is used.

    Raises:
        OSError: the file cannot be read.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "http":
        return grpc.insecure_channel(parts.netloc, options=NO_PROXY)
    roots = None if authorities is None else authorities.read_bytes()
    return grpc.secure_channel(parts.netloc, grpc.ssl_channel_credentials(roots), options=NO_PROXY)
