"""One session with one daemon and all that ends with it: the channel, the threads that send, the mapped arena.

A `RankStore` has one attachment after the other where its daemon is restarted. Must never decide what a lost call
means: that is the store's and its journal's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.errors import StoreError
from trainer_client.transport.arena import Arena
from trainer_client.transport.channel import Pending, open_channel, translate
from trainer_client.transport.credentials import Credentials
from trainer_client.transport.deadlines import Deadlines
from trainer_client.transport.planes import ArenaPlane, LeasedBytes, Plane, StreamPlane
from trainer_client.transport.sender import Sender
from trainer_client.transport.session import Session
from trainer_client.transport.streams import Streams


class Attachment:
    """Opens its session on construction.

    Args:
        on_lost: called once, on the session's thread, with the attachment and the reason, when the session ends
            otherwise than by `close`.

    Raises:
        ConfigError: the address or the credentials cannot be used.
        StoreError: the daemon cannot be reached, or does not let this client in.
    """

    def __init__(
        self,
        address: str,
        client: str,
        credentials: Credentials,
        *,
        prefer_streams: bool,
        on_lost: Callable[[Attachment, StoreError], None],
    ) -> None:
        self._failure: StoreError | None = None
        self.arena: Arena | None = None
        self._channel = open_channel(address, credentials)
        try:
            self.stub = pb_grpc.ParameterStoreStub(self._channel)
            self.session = Session(self.stub, client, partial(on_lost, self))
        except BaseException:
            self._channel.close()
            raise
        self.deadlines = Deadlines.of(self.session.welcome)
        self._sender = Sender()
        self.session_id = self.session.welcome.session_id
        self.epoch = self.session.welcome.epoch
        self.arena_bytes = self.session.welcome.arena.size_bytes
        try:
            self.arena = None if prefer_streams else Arena.map(self.session.welcome.arena)
        except BaseException:
            self.close()
            raise
        streams = Streams(self._channel, self.session_id, self.session.check)
        self.plane: Plane = ArenaPlane(self.arena) if self.arena else StreamPlane(streams)

    def close(self) -> None:
        """Ends the session, and with it all leases; idempotent."""
        self._sender.close()
        if self.arena is not None:
            # Before the session: what this process can write to is not used again until it has let go.
            self.arena.close()
        self._hang_up()

    def leave(self) -> None:
        """Gives up a session whose daemon is gone. The arena of that daemon stays mapped as long as leases of it are
        held: gradients in it have to be handed to the next daemon."""
        self._sender.close()
        self._hang_up()

    def _hang_up(self) -> None:
        self.session.close()
        self._channel.close()

    def check(self) -> None:
        """Waits while a broken stream is taken up again.

        Raises:
            StoreError: the session is over, or a call that nobody waited for has failed.
        """
        self.session.wait_until_attached()
        if self._failure is not None:
            raise self._failure

    def check_leases(self) -> None:
        """Raises SessionEndedError if the leases are void, and their bytes may be somebody else's."""
        if self.arena is not None:
            self.arena.check()

    def owns(self, leased: LeasedBytes) -> bool:
        """Whether the lease is one of this session."""
        return leased.plane is self.plane

    def call(self, method: Any, request: Any, timeout_seconds: float | None = None) -> Any:
        """Makes a call and returns its response; None: it has the deadline of control calls. Raises StoreError."""
        self.check()
        request.session_id = self.session_id
        try:
            return method(request, timeout=timeout_seconds or self.deadlines.control)
        except grpc.RpcError as error:
            # Why it failed, where that is the end of the session.
            self.session.check()
            self.check_leases()
            raise translate(error) from error
        except ValueError:
            # What grpc says of a channel that was closed, which it is once the session is over.
            self.session.check()
            raise

    def begin(self, method: Any, request: Any, timeout_seconds: float | None = None) -> Future[Any]:
        """Begins a call in its turn, and does not wait for its end; its failure is only the caller's."""
        request.session_id = self.session_id
        return self._sender.begin(method, request, timeout_seconds or self.deadlines.control)

    def send(self, method: Any, request: Any) -> Pending[None]:
        """Begins a call that need not be waited for: its failure is also raised by the next `check`."""
        self.check()
        future = self.begin(method, request)
        future.add_done_callback(self.note_failure)
        return Pending(future, lambda _: None)

    def note_failure(self, future: Future[Any], besides: grpc.StatusCode | None = None) -> None:
        """Keeps the failure of a call that nobody waits for, unless it has the code `besides`."""
        # Cancelled is what close() leaves behind.
        if isinstance(error := future.exception(), grpc.RpcError):
            failure = translate(error)
            if failure.code is not besides:
                self._failure = failure

    def give_back(self, lease_ids: Iterable[int]) -> None:
        """Return leases after a failure, without publishing what they hold. Does not wait and raises nothing.

        The store may have taken some of them already, for a call of which only the answer is missing: each is therefore
        returned by a call of its own, which may find it gone.
        """
        for lease_id in lease_ids:
            releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease_id)]
            future = self.begin(self.stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=releases))
            future.add_done_callback(partial(self.note_failure, besides=grpc.StatusCode.NOT_FOUND))

    def release(self, releases: Sequence[pb.ReleaseLeasesRequest.Release]) -> Pending[None]:
        """Returns leases. Does not wait, and need not be waited for."""
        if not releases:
            done: Future[None] = Future()
            done.set_result(None)
            return Pending(done, lambda _: None)
        return self.send(self.stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=releases))
