"""The daemon's gRPC servers: their limits, their addresses, and the warnings about who can reach them.

This module owns the addresses from their binding to the clean-up. It must never know a service of the daemon other than
gRPC's health service.
"""

from __future__ import annotations

import contextlib
import logging

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from paramserver.config import DaemonConfig
from paramserver.contract.address import is_loopback
from paramserver.contract.limits import MAX_FRAME_BYTES
from paramserver.contract.sockets import grpc_target
from paramserver.errors import StartError
from paramserver.metrics.visitors import MOST_VISITORS
from paramserver.process.descriptors import connections_of_a_listener
from paramserver.process.socket_file import SocketFile

log = logging.getLogger(__name__)

# The most bytes of a gRPC message of the daemon. The largest message describes a layout of some ten thousand
# parameters. Tensor bytes need no larger messages, because they are sent in chunks.
MAX_MESSAGE_BYTES = 16 << 20
# gRPC's options for pings to clients, because a client's machine or network may fail silently. The client's session
# ends when its heartbeats stop, long before these pings fail. When they fail, gRPC closes the connection, too. The last
# option is the shortest interval at which a client may ping.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_500),
)
# The maximum number of calls under way on one connection; gRPC's clients hold further calls back. The limit is far
# above what trainers and readers use, and bounds the memory that one connection can make the daemon hold.
MAX_CALLS_OF_A_CONNECTION = 1024
# The limits of the server at `health_listen`. It answers every caller without a token, so it allows only a few probes
# at once, and each of them may send only a few bytes.
HEALTH_CONNECTIONS = 32
HEALTH_LIMITS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_allowed_incoming_connections", HEALTH_CONNECTIONS),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Connections of health probes end after this time. A probe takes milliseconds, but a call of Watch never ends by
    # itself, so it ends with its connection.
    ("grpc.max_connection_age_ms", 5_000),
    ("grpc.max_connection_age_grace_ms", 100),
)


def make_server(config: DaemonConfig) -> grpc.aio.Server:
    """Return the server of the store's services, which is neither bound nor started."""
    return grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.max_frame_size", MAX_FRAME_BYTES),
            *KEEPALIVE,
            *_connection_limits(config),
        ]
    )


def listen(
    server: grpc.aio.Server,
    config: DaemonConfig,
    credentials: grpc.ServerCredentials | None,
    cleanup: contextlib.AsyncExitStack,
) -> None:
    """Bind the server to the socket, whose file `cleanup` removes, and to the TCP address if there is one."""
    file = SocketFile(config.socket_path)
    _bind(server, grpc_target(file.bound_at), f"socket {file.path}")
    cleanup.callback(file.remove)
    file.publish()
    if config.listen is not None:
        _bind(server, config.listen, f"listen address {config.listen}", credentials)
        _tell_who_is_trusted(config)


async def start(
    server: grpc.aio.Server,
    health_address: str | None,
    health_service: health.aio.HealthServicer,
    cleanup: contextlib.AsyncExitStack,
) -> None:
    """Start the server, and a second one with the health service alone if `health_address` is set, until `cleanup`.

    A probe such as that of Kubernetes has neither a certificate nor a token, and the answer that it gets is no secret.
    """
    if health_address is None:
        await server.start()
        return
    health_server = grpc.aio.server(options=HEALTH_LIMITS)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, health_server)
    # The health server's address is bound before the main server starts. If the binding failed after that start,
    # clients would be served while the engine is being closed.
    _bind(health_server, health_address, f"health_listen address {health_address}")
    await server.start()
    await health_server.start()
    cleanup.push_async_callback(health_server.stop, None)
    log.info("health service at %s", health_address)


def _connection_limits(config: DaemonConfig) -> list[tuple[str, int]]:
    """Return gRPC's options for connections. gRPC applies the limit of connections to each listener separately."""
    idle_millis = int(config.connection_idle_seconds * 1000)
    listeners = 1 if config.listen is None else 2
    elsewhere = (MOST_VISITORS if config.metrics_listen else 0) + (HEALTH_CONNECTIONS if config.health_listen else 0)
    return [
        ("grpc.max_allowed_incoming_connections", connections_of_a_listener(listeners, config.max_sessions, elsewhere)),
        # The time in which a new connection must complete the TLS handshake and send the first HTTP/2 frame.
        ("grpc.server_handshake_timeout_ms", idle_millis),
        # The longest time for which a connection may have no call under way. The stream of a session is a call, so it
        # keeps its connection open.
        ("grpc.max_connection_idle_ms", idle_millis),
        ("grpc.max_concurrent_streams", MAX_CALLS_OF_A_CONNECTION),
    ]


def _tell_who_is_trusted(config: DaemonConfig) -> None:
    """Log a warning where the configuration trusts more clients, or the network more, than an operator may expect."""
    if config.token_file is None:
        who = "every client with a certificate" if config.tls_certificate else "every client that can reach the daemon"
        log.warning("%s may do everything at %s: there is no token_file", who, config.listen)
    elif config.tls_certificate is None and not is_loopback(config.listen or ""):
        log.warning("tokens cross the network in the clear to %s: there is no tls_certificate", config.listen)


def _bind(server: grpc.aio.Server, address: str, what: str, credentials: grpc.ServerCredentials | None = None) -> None:
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {what}: it is in use or not an address of this machine") from error
    if bound == 0:
        raise StartError(f"cannot listen on {what}")
