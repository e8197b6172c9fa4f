"""The HTTP endpoint of the metrics, on threads of its own, so that a slow reader of it never holds up the event loop.

Owns the listening socket and the threads. Must never answer more than a few requests at once, must never wait for a
silent client without bound, and must never show metrics to a caller who may not see them.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from paramserver.contract.address import host_and_port
from paramserver.errors import StartError
from paramserver.security.gate import Gate, RefusedError, UnauthenticatedError, check_admin
from paramserver.security.tls import CertificateFiles, HttpsContext

log = logging.getLogger(__name__)

PATH = "/metrics"
MOST_REQUESTS = 8
_SILENCE_SECONDS = 10.0
_PLAIN = [("Content-Type", "text/plain; charset=utf-8")]


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.client_address[0], *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 2 * MOST_REQUESTS

    def __init__(self, host: str, port: int, wrap: Callable[[socket.socket], socket.socket]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._wrap = wrap
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # WSGIServer would look the host's name up in DNS, which may take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            log.warning("metrics: a request was dropped, because %d are under way", MOST_REQUESTS)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # The thread was not started.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_SILENCE_SECONDS)
            # The handshake is done here and not where connections are accepted, so that a client that never answers
            # holds up this thread alone.
            super().process_request_thread(self._wrap(request), client_address)
        except OSError as error:
            log.debug("metrics: the connection from %s failed: %s", client_address[0], error)
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a request of %s failed", client_address[0], exc_info=True)


class MetricsEndpoint:
    """An HTTP server for GET /metrics, which serves until it is closed."""

    def __init__(
        self, address: str, registry: CollectorRegistry, gate: Gate, certificates: CertificateFiles | None
    ) -> None:
        """Listen, and serve from now on.

        Args:
            address: `HOST:PORT`; port 0: a free one.
            registry: the metrics.
            gate: says whose token may see them: an admin's. Without tokens, every client that gets through may.
            certificates: for mutual TLS; None: plain HTTP.

        Raises:
            StartError: the address cannot be listened on.
        """
        host, port = host_and_port(address)
        try:
            self._server = _Server(host, port, _wrapping(certificates))
        except OSError as error:
            raise StartError(
                f"metrics_listen: cannot listen on {address}: {error.strerror}; choose another address"
            ) from error
        self._metrics = make_wsgi_app(registry)
        self._gate = gate
        self._server.set_app(self._answer)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Must not be called on the event loop's thread, because a last answer may need the loop."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", _PLAIN)
            return [f"there is nothing but {PATH} here\n".encode()]
        try:
            check_admin(self._gate.principal_of(environ.get("HTTP_AUTHORIZATION")))
        except RefusedError as error:
            unknown = isinstance(error, UnauthenticatedError)
            challenge = [("WWW-Authenticate", "Bearer")] if unknown else []
            start_response("401 Unauthorized" if unknown else "403 Forbidden", [*_PLAIN, *challenge])
            return [b"the metrics need the token of an admin: Authorization: Bearer TOKEN\n"]
        try:
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        except TimeoutError:
            start_response("503 Service Unavailable", _PLAIN)
            return [b"the daemon's event loop did not answer\n"]
        except Exception:
            log.exception("metrics: a reading failed in an unforeseen way")
            start_response("500 Internal Server Error", _PLAIN)
            return [b"internal error; see the daemon's log\n"]


def _wrapping(certificates: CertificateFiles | None) -> Callable[[socket.socket], socket.socket]:
    if certificates is None:
        return lambda connection: connection
    context = HttpsContext(certificates)
    return lambda connection: context.current().wrap_socket(connection, server_side=True)
