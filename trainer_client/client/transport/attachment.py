"""An attachment: one session with one daemon, and all that ends with it (channel, sender thread, mapped arena).

When its daemon is restarted, a `RankStore` opens a new attachment. This module must never decide what a lost call
means, because the `RankStore` and its journal decide that. `OpenSession` is also the base class of the sessions of a
`StoreClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc

from paramserver.contract.bearer import TraceParent
from paramserver.contract.capabilities import REPEATED_CALLS, RETURNING_RANKS
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub
from trainer_client.client.transport.arena import MappedArena
from trainer_client.client.transport.channel import Pending, open_channel, translate
from trainer_client.client.transport.credentials import Credentials
from trainer_client.client.transport.deadlines import Deadlines
from trainer_client.client.transport.pinning import PinDriver, announce, is_announced
from trainer_client.client.transport.planes import ArenaPlane, LeasedBytes, Plane, StreamPlane
from trainer_client.client.transport.sender import Sender
from trainer_client.client.transport.session import OnRankGone, Session
from trainer_client.client.transport.streams import Streams
from trainer_client.errors import StoreError, StoreUnavailableError


class OpenSession:
    """A session with a daemon, and the daemon's shared memory (the arena) if this process maps it.

    Attributes:
        stub: makes the calls.
        session: the session.
        session_id: its name in the requests of calls.
        epoch: the random name of the daemon's start.
        arena_bytes: the size of the daemon's shared memory.
        capabilities: the daemon's capabilities, by the names of paramserver/contract/capabilities.py.
        arena: the mapping of that memory; None: the bytes of leases are sent by gRPC.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        begin: Callable[..., Session],
        *,
        prefer_streams: bool,
        driver: PinDriver | None = None,
    ) -> None:
        """Open the session.

        Args:
            channel: the channel of the calls, which stays the caller's.
            begin: opens a session with a stub and returns it; takes `registers_arena` by keyword.
            prefer_streams: do not map the memory even if this is possible.
            driver: registers the memory with this process's device; None: nothing is registered.

        Raises:
            StoreError: the daemon refuses the session or does not answer in time.
            OSError: the memory cannot be mapped. The session is closed again.
        """
        self.stub = pb_grpc.ParameterStoreStub(channel)
        if driver is not None:
            announce()
        registers = is_announced()
        self.session = begin(self.stub, registers_arena=registers)
        welcome = self.session.welcome
        self.session_id = welcome.session_id
        self.epoch = welcome.epoch
        self.arena_bytes = welcome.arena.size_bytes
        self.capabilities = frozenset(welcome.capabilities)
        self.arena: MappedArena | None = None
        with ExitStack() as after_error:
            after_error.callback(self.session.close)
            if not prefer_streams:
                self.arena = MappedArena.map(welcome.arena, driver, is_announced=registers)
            after_error.pop_all()

    def close(self) -> None:
        """End the session, and with it its leases and readers; idempotent."""
        if self.arena is not None:
            # The arena is closed before the session. `close` of the arena waits until the device has done its copies,
            # and then unmaps the memory. Only then may the daemon give the memory to another session.
            self.arena.close()
        self.session.close()

    def check_leases(self) -> None:
        """Raise SessionEndedError if the leases are void, because their memory may hold another session's bytes."""
        if self.arena is not None:
            self.arena.check()


class Attachment(OpenSession):
    """One session with one daemon, which the constructor opens.

    Args:
        address: `unix:/path` or `host:port`.
        client: name of this client, shown to people who operate the daemon.
        credentials: token and TLS files to connect with.
        prefer_streams: use gRPC streams even if the arena can be mapped.
        driver: registers the arena with this rank's device; None: this rank registers nothing.
        trace_parent: adds the span of the step under way to every call; None: the calls have no trace.
        on_lost: called once, on the session's thread, with the attachment and the error, if the session ends otherwise
            than by `close`.
        on_rank_gone: called on the session's thread when another rank of the run has gone.
        patience_seconds: how long to try to resume the session with a daemon that does not answer.

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
        driver: PinDriver | None = None,
        trace_parent: TraceParent | None = None,
        on_lost: Callable[[Attachment, StoreError], None],
        on_rank_gone: OnRankGone,
        patience_seconds: float = 0.0,
    ) -> None:
        self._failure: StoreError | None = None
        self._channel = open_channel(address, credentials, trace_parent)
        begin = partial(
            Session,
            client=client,
            on_lost=partial(on_lost, self),
            on_rank_gone=on_rank_gone,
            connect=partial(open_channel, address, credentials, trace_parent),
            patience_seconds=patience_seconds,
        )
        with ExitStack() as after_error:
            after_error.callback(self._channel.close)
            super().__init__(self._channel, begin, prefer_streams=prefer_streams, driver=driver)
            # The sender's thread may fail to start, because the kernel refuses it. Then the session is closed, so that
            # the daemon does not keep it.
            after_error.callback(super().close)
            self._sender = Sender(self.session if REPEATED_CALLS in self.capabilities else None)
            after_error.pop_all()
        self.admin = StoreAdminStub(self._channel)
        self.deadlines = Deadlines.of(self.session.welcome)
        streams = Streams(self._channel, self.session_id, self.session.check)
        self.plane: Plane = ArenaPlane(self.arena) if self.arena else StreamPlane(streams)

    @property
    def can_come_back(self) -> bool:
        """Whether this rank may go on in another session after the daemon has ended this one.

        See attachments.py [Note: the same daemon].
        """
        may_copy_later = self.arena is not None and self.arena.pins is not None
        return RETURNING_RANKS in self.capabilities and not may_copy_later

    def close(self) -> None:
        """End the session, and with it all leases; idempotent."""
        self._sender.close()
        super().close()
        self._channel.close()

    def close_session(self) -> None:
        """End a session whose daemon is gone, but leave its arena mapped.

        The arena is unmapped when its last lease is gone, because gradients in it are still to be handed to the next
        daemon. The arena does not wait for this object's end, because errors of unanswered calls may refer to the
        object for long.
        """
        self._sender.close()
        self.session.close()
        self._channel.close()
        if self.arena is not None:
            self.arena.let_go()

    def check(self) -> None:
        """Wait while the session's broken stream is being resumed, and raise the failure of an earlier call.

        Raises:
            StoreError: the session has ended, or an earlier call failed that the caller did not wait for.
        """
        self.session.wait_until_attached()
        if self._failure is not None:
            raise self._failure

    def owns(self, leased: LeasedBytes) -> bool:
        """Return whether the lease belongs to this session."""
        return leased.plane is self.plane

    def call(self, method: Any, request: Any, timeout_seconds: float | None = None) -> Any:
        """Make a call and return its response. The default deadline is that of control calls.

        It can raise StoreError.
        """
        request.session_id = self.session_id
        return self._call(method, request, timeout_seconds, has_session=True)

    def call_without_session(self, method: Any, request: Any, timeout_seconds: float | None = None) -> Any:
        """Make a call whose request names no session, as those of StoreAdmin, and return its response.

        The call must be idempotent, because the daemon may execute it twice. Errors and deadline are those of `call`.
        """
        return self._call(method, request, timeout_seconds, has_session=False)

    def _call(self, method: Any, request: Any, timeout_seconds: float | None, *, has_session: bool) -> Any:
        self.check()
        timeout_seconds = timeout_seconds or self.deadlines.control
        try:
            return self._sender.begin(method, request, timeout_seconds, has_session=has_session).result()
        except grpc.RpcError as error:
            failure: Exception = translate(error)
        except grpc.FutureCancelledError:
            # The call's future was cancelled, because the sender or the channel was closed, as happens when the session
            # ends. So the error for a closed session is raised.
            failure = StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed")
        # If the session has ended, the session's error is raised instead of the call's, because the end of the session
        # made the call fail.
        self.session.check()
        self.check_leases()
        raise failure

    def begin(self, method: Any, request: Any, timeout_seconds: float | None = None) -> Future[Any]:
        """Queue a call behind the earlier calls, and return its future at once.

        If the call fails, only the future has the error: `check` does not raise it.
        """
        request.session_id = self.session_id
        return self._sender.begin(method, request, timeout_seconds or self.deadlines.control)

    def send(self, method: Any, request: Any) -> Pending[None]:
        """Begin a call that the caller need not wait for, because the next `check` raises its failure, too."""
        self.check()
        future = self.begin(method, request)
        future.add_done_callback(self.note_failure)
        return Pending(future, lambda _: None)

    def note_failure(self, future: Future[Any], besides: grpc.StatusCode | None = None) -> None:
        """Keep the failure of a call for the next `check`, unless its status code is `besides`."""
        # A call's future that `close` has cancelled raises no RpcError, and its cancellation is no failure.
        if isinstance(error := future.exception(), grpc.RpcError):
            failure = translate(error)
            if failure.code is not besides:
                self._failure = failure

    def release_quietly(self, lease_ids: Iterable[int]) -> None:
        """Release leases after a failure, without publishing what was written. It neither waits nor raises.

        The store may have consumed some of the leases, if a call was executed and only its response was lost. Each
        lease is therefore released by a call of its own, which may fail with NOT_FOUND.
        """
        for lease_id in lease_ids:
            releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease_id)]
            future = self.begin(self.stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=releases))
            future.add_done_callback(partial(self.note_failure, besides=grpc.StatusCode.NOT_FOUND))

    def release(self, releases: Sequence[pb.ReleaseLeasesRequest.Release]) -> Pending[None]:
        """Release leases. It does not wait; the result may be ignored."""
        if not releases:
            done: Future[None] = Future()
            done.set_result(None)
            return Pending(done, lambda _: None)
        return self.send(self.stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=releases))
