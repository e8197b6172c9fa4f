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
# The most answers with figures that the HTTP endpoint makes at the same time. A caller waits for its turn only after it
# has shown that it may see the figures, so strangers take no turns.
MOST_ANSWERS = 8
# The most bytes of an HTTP request's first line and headers. Browsers send less than 2 kB, Prometheus 300 bytes.
_MOST_REQUEST_BYTES = 16 << 10
# The most digits that a request may have in the number of a sample. A daemon takes a sample every two seconds, so it
# never reaches a longer number.
_MOST_DIGITS = 18
# The headers of an answer in plain text. Each answer makes a list of this tuple, because the HTTP server adds headers
# to the list that it gets.
_PLAIN = (("Content-Type", "text/plain; charset=utf-8"),)
# The HTTP endpoint's pause after the kernel refused to accept a connection, so that it does not try again at once.
_RETRY_SECONDS = 0.2
# The key under which a request's WSGI environment has the HttpVisitor that sent the request.
_VISITOR = "paramserver.visitor"


class _Handler(WSGIRequestHandler):
    """The handler of one connection, which reads one request, answers it and ends."""

    def __init__(self, visitor: HttpVisitor, client_address: Any, server: _Server) -> None:
        self._visitor = visitor
        super().__init__(visitor.connection, client_address, server)

    def setup(self) -> None:
        super().setup()
        # Python's HTTP server would read up to 100 headers of 64 KiB from each stranger. So it gets a file with the
        # request that `_request_of` has read, which has at most _MOST_REQUEST_BYTES.
        self.rfile.close()
        self.rfile = io.BytesIO(_request_of(self._visitor.connection))

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), _VISITOR: self._visitor}

    def get_stderr(self) -> Any:
        # Python's HTTP server writes a stack trace here when a client leaves in the middle of its answer. The trace is
        # dropped, because the daemon's own faults are logged where they occur.
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: " + format, self.client_address[0], *args)


def _request_of(connection: socket.socket) -> bytes:
    """Return the request line and the headers of an HTTP request. Raise OSError if they are cut off or too large."""
    request = b""
    while b"\r\n\r\n" not in request:
        received = connection.recv(_MOST_REQUEST_BYTES - len(request))
        if not received:
            raise ConnectionAbortedError("the request has no end, or is too large")
        request += received
    return request


class _Server(WSGIServer):
    # The most connections that wait in the kernel's queue while the endpoint has MOST_VISITORS open ones.
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
        # The socket is bound here and not in WSGIServer, which would look the host's name up in DNS. That may take
        # seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # The kernel refuses to accept a connection, for example because the process has no free descriptor. The
            # connection stays in the kernel's queue, so the server's loop would call accept again at once without this
            # pause.
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
            # The operating system refused to start the visitor's thread. The error is raised again, so that the HTTP
            # server closes the connection.
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
        """Make the TLS handshake if the endpoint uses TLS. Return whether the visitor's request may be read now.

        The handshake is made on the visitor's thread, so that a client that never answers holds up this thread alone.
        This raises OSError if the client leaves.
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
        """Listen at an address, and answer requests from now on, on threads of this object.

        Args:
            address: `HOST:PORT`. With port 0 the kernel chooses a free port.
            registry: the metrics.
            gate: checks that the caller has an admin's token. Without tokens, every client that can connect sees the
                figures.
            certificates: the files for mutual TLS, or None if the endpoint serves plain HTTP.
            page: the figures of the page, or None if the endpoint serves no page.
            names: the names of hosts under which the endpoint answers, besides those of loopback. If there are none, it
                answers under every name; but where it listens on loopback without TLS, it answers only under the names
                of loopback.

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
        # its own name, once it has let that name lead to a loopback address. So a request on loopback must have a known
        # name.
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
        """Call `answer` for a request that asks for figures, if the request has an admin's token.

        Answer with an error if it has none, or if the event loop does not give the figures in time.
        """
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
