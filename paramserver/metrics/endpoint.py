"""The HTTP endpoint of metrics and page, on threads of its own, so that a slow reader never holds up the event loop.

This module owns the listening socket and the threads. It must never answer more than a few requests at once, must never
wait for a silent client without bound, and must never show figures to a caller who has no right to see them.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from paramserver.contract.address import host_and_port, is_loopback
from paramserver.errors import StartError
from paramserver.page.data import PageData
from paramserver.page.web import CONFINED, document
from paramserver.security.gate import Gate, RefusedError, UnauthenticatedError, check_admin
from paramserver.security.tls import CertificateFiles, HttpsContext

log = logging.getLogger(__name__)

PATH = "/metrics"
PAGE_PATH = "/"
DATA_PATH = "/data.json"
MOST_REQUESTS = 8
_SILENCE_SECONDS = 10.0
# The most seconds from the acceptance of a connection to the end of its answer, however slowly the client goes on.
_REQUEST_SECONDS = 60.0
# The most digits of a sample's number in a request. A daemon that takes a sample every two seconds never reaches a
# longer number.
_MOST_DIGITS = 18
# A tuple, because the HTTP server adds headers to the list that it gets; each answer makes a list of its own from it.
_PLAIN = (("Content-Type", "text/plain; charset=utf-8"),)


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
        # The kernel keeps ended connections for a minute. Without this option, a daemon that is started again could not
        # listen on its address during that minute.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
            # The operating system refused to start the thread that serves the request, so nothing else would release
            # the permit that was acquired above.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            with _time_limit(request):
                request.settimeout(_SILENCE_SECONDS)
                # The handshake is done here and not where connections are accepted, so that a client that never
                # answers holds up this thread alone.
                super().process_request_thread(self._wrap(request), client_address)
        except (OSError, RuntimeError) as error:
            # A RuntimeError says that the thread of the time limit was not started.
            log.debug("metrics: the connection from %s failed: %s", client_address[0], error)
            self.shutdown_request(request)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a request of %s failed", client_address[0], exc_info=True)


@contextlib.contextmanager
def _time_limit(connection: socket.socket) -> Iterator[None]:
    """End a connection after _REQUEST_SECONDS, unless the context ends first.

    The connection's thread then sees the end.
    """
    # A duplicate is ended, because HTTPS replaces the connection by another socket object, which is closed on its own.
    with connection.dup() as duplicate:
        limit = threading.Timer(_REQUEST_SECONDS, _cut_off, [duplicate])
        limit.daemon = True
        limit.start()
        try:
            yield
        finally:
            limit.cancel()
            # The duplicate must not be closed while the timer uses it.
            limit.join()


def _cut_off(connection: socket.socket) -> None:
    # The client may have ended the connection already.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class MetricsEndpoint:
    """An HTTP server for GET of /metrics, and of the page and its figures, which serves until it is closed."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        gate: Gate,
        certificates: CertificateFiles | None,
        page: PageData | None,
        names: Collection[str] = (),
    ) -> None:
        """Listen, and serve from now on.

        Args:
            address: `HOST:PORT`; port 0: a free one.
            registry: the metrics.
            gate: checks that the caller has an admin's token. Without tokens, every client that can connect sees the
                figures.
            certificates: for mutual TLS; None: plain HTTP.
            page: the figures of the page; None: there is no page.
            names: the names of hosts under which it answers, besides those of loopback. Without any, it answers under
                no others where it listens on loopback without TLS, and elsewhere under every name.

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
        self._page = page
        # A program on another machine cannot connect to loopback. A web site in a browser of this machine can, under
        # its own name, once it has let that name lead to a loopback address.
        self._asks_for_name = bool(names) or (certificates is None and is_loopback(address))
        self._names = {name.lower() for name in names}
        self._server.set_app(self._answer)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Do not call this on the event loop's thread, because a last answer may need the loop."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if self._asks_for_name and not self._is_known_name(environ.get("HTTP_HOST", "")):
            start_response("421 Misdirected Request", [*_PLAIN])
            named = "".join(f", {name}" for name in sorted(self._names))
            return [
                f"this endpoint answers under these names only: 127.0.0.1, [::1], localhost{named}; metrics_names of "
                "the daemon's configuration adds others\n".encode()
            ]
        if path == PATH:
            return self._checked(self._metrics, environ, start_response)
        if self._page is None or path not in (PAGE_PATH, DATA_PATH):
            start_response("404 Not Found", [*_PLAIN])
            there = PATH if self._page is None else f"{PAGE_PATH}, {DATA_PATH} and {PATH}"
            return [f"there is nothing but {there} here\n".encode()]
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [*_PLAIN, ("Allow", "GET, HEAD")])
            return [b"this can be read only: GET or HEAD\n"]
        if path == PAGE_PATH:
            html, policy = document()
            headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", policy)]
            return _answer_with(html, headers, environ, start_response)
        return self._checked(self._answer_data, environ, start_response)

    def _is_known_name(self, host: str) -> bool:
        """Return whether a Host header, with or without a port, has a name under which this endpoint answers."""
        has_port = host.rpartition("]")[2].count(":") == 1
        name = (host.rpartition(":")[0] if has_port else host).lower()
        return name in self._names or is_loopback(f"{name}:")

    def _answer_data(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        assert self._page is not None
        given = parse_qs(environ.get("QUERY_STRING", "")).get("since", ["0"])[-1]
        if not given.isascii() or not given.isdigit() or len(given) > _MOST_DIGITS:
            start_response("400 Bad Request", [*_PLAIN])
            return [b"since: write the number of a sample, as in data.json?since=120\n"]
        body = self._page.to_json(int(given))
        return _answer_with(body, [("Content-Type", "application/json")], environ, start_response)

    def _checked(
        self,
        answer: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]],
        environ: WSGIEnvironment,
        start_response: StartResponse,
    ) -> Iterable[bytes]:
        """Answer with figures of the daemon, if the caller may see them and the event loop gives them."""
        try:
            check_admin(self._gate.principal_of(environ.get("HTTP_AUTHORIZATION")))
        except RefusedError as error:
            unknown = isinstance(error, UnauthenticatedError)
            challenge = [("WWW-Authenticate", "Bearer")] if unknown else []
            start_response("401 Unauthorized" if unknown else "403 Forbidden", [*_PLAIN, *challenge])
            return [b"this needs the token of an admin: Authorization: Bearer TOKEN\n"]
        try:
            return answer(environ, start_response)
        except TimeoutError:
            start_response("503 Service Unavailable", [*_PLAIN])
            return [b"the daemon's event loop did not answer\n"]
        except Exception:
            log.exception("metrics: a reading failed in an unforeseen way")
            start_response("500 Internal Server Error", [*_PLAIN])
            return [b"internal error; see the daemon's log\n"]


def _answer_with(
    body: bytes, headers: Sequence[tuple[str, str]], environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    start_response("200 OK", [*headers, *CONFINED, ("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _wrapping(certificates: CertificateFiles | None) -> Callable[[socket.socket], socket.socket]:
    if certificates is None:
        return lambda connection: connection
    context = HttpsContext(certificates)
    return lambda connection: context.current().wrap_socket(connection, server_side=True)
