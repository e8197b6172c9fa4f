"""The HTTP endpoint of metrics and page, on threads of its own, so that a slow reader never holds up the event loop.

This module owns the listening socket and the threads. It must never make more than a few answers at once, and must
never show figures to a caller who has no right to see them. visitors.py decides which connections stay open.
"""

from __future__ import annotations

import io
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from paramserver.contract.address import host_and_port, is_loopback
from paramserver.errors import StartError
from paramserver.metrics.visitors import MOST_VISITORS, HttpVisitor, Visitors
from paramserver.page.data import PageData
from paramserver.page.web import CONFINED, document
from paramserver.process.background import ANSWER_SECONDS
from paramserver.security.gate import Gate, RefusedError, UnauthenticatedError, check_admin
from paramserver.security.tls import CertificateFiles, HttpsContext

log = logging.getLogger(__name__)

PATH = "/metrics"
PAGE_PATH = "/"
DATA_PATH = "/data.json"
# The most answers with figures that are made at once. Only callers who may see the figures wait for their turn.
MOST_ANSWERS = 8
# The most bytes of a request, which is a GET with some headers. Browsers send less than 2 kB, Prometheus 300 bytes.
_MOST_REQUEST_BYTES = 16 << 10
# The most digits of a sample's number in a request. A daemon that takes a sample every two seconds never reaches a
# longer number.
_MOST_DIGITS = 18
# A tuple, because the HTTP server adds headers to the list that it gets; each answer makes a list of its own from it.
_PLAIN = (("Content-Type", "text/plain; charset=utf-8"),)
# The pause after an accept that the kernel refused.
_RETRY_SECONDS = 0.2
# The key of the visitor in the environment of a request.
_VISITOR = "paramserver.visitor"


class _Handler(WSGIRequestHandler):
    """The answer to one request. A connection has no second one."""

    def __init__(self, visitor: HttpVisitor, client_address: Any, server: _Server) -> None:
        self._visitor = visitor
        super().__init__(visitor.connection, client_address, server)

    def setup(self) -> None:
        super().setup()
        # The library would take up to 100 headers of 64 KiB from each stranger, so it gets a request of limited size.
        self.rfile.close()
        self.rfile = io.BytesIO(_request_of(self._visitor.connection))

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), _VISITOR: self._visitor}

    def get_stderr(self) -> Any:
        # The library writes a stack when a client leaves in the middle of its answer. A fault of the daemon is logged
        # where it happens.
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.client_address[0], *args)


def _request_of(connection: socket.socket) -> bytes:
    """Return the request's line and headers. Raise OSError if they do not come, or are larger than allowed."""
    request = b""
    while b"\r\n\r\n" not in request:
        received = connection.recv(_MOST_REQUEST_BYTES - len(request))
        if not received:
            raise ConnectionAbortedError("the request has no end, or is too large")
        request += received
    return request


class _Server(WSGIServer):
    # The kernel's queue of connections that wait for a place among the visitors.
    request_queue_size = 8 * MOST_VISITORS

    def __init__(self, host: str, port: int, wrap: Callable[[socket.socket], socket.socket]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.visitors = Visitors()
        self._wrap = wrap
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

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # The kernel refuses to accept a connection, for example because the process has no free descriptor. The
            # connection waits in the kernel's queue, so the caller would try again without a pause.
            time.sleep(_RETRY_SECONDS)
            raise

    def service_actions(self) -> None:
        self.visitors.look()

    def process_request(self, request: Any, client_address: Any) -> None:
        visitor = self.visitors.admit(request, client_address[0])
        serving = threading.Thread(target=self._serve, args=(visitor, client_address), daemon=True)
        try:
            serving.start()
        except RuntimeError:
            # The operating system refused to start the thread. The caller closes the connection.
            self.visitors.leave(visitor)
            raise

    def _serve(self, visitor: HttpVisitor, client_address: Any) -> None:
        try:
            if self._shake_hands(visitor):
                _Handler(visitor, client_address, self)
        except Exception:
            self.handle_error(None, client_address)
        finally:
            self.visitors.leave(visitor)
            self.shutdown_request(visitor.connection)

    def _shake_hands(self, visitor: HttpVisitor) -> bool:
        """Return whether a visitor may go on, after TLS where there is TLS.

        This is done on the visitor's thread, so that a client that never answers holds up this thread alone. It raises
        OSError if the client leaves.
        """
        visitor.go_on_with(self._wrap(visitor.connection))
        if isinstance(visitor.connection, ssl.SSLSocket):
            try:
                visitor.connection.do_handshake()
            except ssl.SSLEOFError:
                raise
            except ssl.SSLError as error:
                self.visitors.note_refusal(visitor, f"without TLS ({error.reason})")
                return False
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics: a connection of %s failed", client_address[0], exc_info=True)


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
        self._answers = threading.BoundedSemaphore(MOST_ANSWERS)
        self._server.set_app(self._answer)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Do not call this on the event loop's thread, because a last answer may need the loop."""
        self._server.visitors.close()
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
        visitor: HttpVisitor = environ[_VISITOR]
        try:
            check_admin(self._gate.principal_of(environ.get("HTTP_AUTHORIZATION")))
        except RefusedError as error:
            self._server.visitors.note_refusal(visitor, f"with {error}")
            unknown = isinstance(error, UnauthenticatedError)
            challenge = [("WWW-Authenticate", "Bearer")] if unknown else []
            start_response("401 Unauthorized" if unknown else "403 Forbidden", [*_PLAIN, *challenge])
            return [b"this needs the token of an admin: Authorization: Bearer TOKEN\n"]
        visitor.be_known()
        try:
            if not self._answers.acquire(timeout=ANSWER_SECONDS):
                raise TimeoutError
            try:
                return answer(environ, start_response)
            finally:
                self._answers.release()
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
    return lambda connection: context.current().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
