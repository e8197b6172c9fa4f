"""The session with the daemon: one bidirectional stream that carries this process's liveness.

Owns the stream and the thread that reads it. Must never be driven by the training loop: heartbeats go on while a step
computes. grpc's synchronous API, for a trainer may run an event loop of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.channel import CONTROL_DEADLINE_SECONDS, translate
from trainer_client.errors import StoreError, StoreTimeoutError, StoreUnavailableError

log = logging.getLogger(__name__)

# Heartbeats per interval that the store asks for: one lost to a busy machine does no harm.
_HEARTBEATS_PER_INTERVAL = 2


class Session:
    """Opens on construction; StoreError if the daemon does not welcome us."""

    def __init__(self, stub: pb_grpc.ParameterStoreStub, client: str) -> None:
        self._closing = threading.Event()
        self._answered = threading.Event()
        self._welcome: pb.SessionResponse.Welcome | None = None
        self._interval_seconds = 1.0
        self._failure: StoreError | None = None
        self._call = stub.Session(self._requests(client))
        self._reader = threading.Thread(target=self._read, name="paramserver-session", daemon=True)
        self._reader.start()
        if not self._answered.wait(CONTROL_DEADLINE_SECONDS):
            self.close()
            raise StoreTimeoutError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the daemon did not welcome the session within {CONTROL_DEADLINE_SECONDS:g} s",
            )
        self.check()

    @property
    def welcome(self) -> pb.SessionResponse.Welcome:
        assert self._welcome is not None
        return self._welcome

    def check(self) -> None:
        """Raises StoreError if the session is over: all leases are void then."""
        if self._failure is not None:
            raise type(self._failure)(self._failure.code, self._failure.message)

    def close(self) -> None:
        """Ends the stream; idempotent."""
        self._closing.set()
        self._reader.join(timeout=2.0)
        if self._reader.is_alive():
            self._call.cancel()

    def _requests(self, client: str) -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(hello=pb.SessionRequest.Hello(client=client))
        while not self._closing.wait(self._interval_seconds):
            yield pb.SessionRequest(heartbeat=pb.Heartbeat())

    def _read(self) -> None:
        try:
            for response in self._call:
                kind = response.WhichOneof("message")
                if kind == "welcome":
                    interval = response.welcome.heartbeat_interval_millis / 1000
                    self._interval_seconds = interval / _HEARTBEATS_PER_INTERVAL
                    self._welcome = response.welcome
                    self._answered.set()
                elif kind == "notice":
                    log.warning("store daemon: %s", response.notice.text)
            self._failure = StoreUnavailableError(
                grpc.StatusCode.UNAVAILABLE,
                "the store daemon has ended the session: look at its log, then restart the job; "
                "it resumes from the last commit",
            )
        except grpc.RpcError as error:
            self._failure = translate(error)
        self._answered.set()
