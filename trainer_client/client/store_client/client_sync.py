"""The store client for scripts that do not train: they put tensors, commit them as steps and read them back.

Its calls block; `client.py` wraps it for asyncio. All calls may come from several threads, and each has a deadline.
After a break of the connection or a restart of the daemon, idempotent calls are repeated, with jittered pauses.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

import grpc
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.store_client.connection import Call, Connection, Timeout
from trainer_client.client.store_client.job_layout import JobLayout
from trainer_client.client.store_client.reader import StoreReaderSync, list_tensors
from trainer_client.client.store_client.types import Commit, Placement, StoredJob, StoredTensor, TensorSpec, check_name
from trainer_client.client.store_client.writer import DEFAULT_SHARD_BYTES, StoreWriterSync
from trainer_client.client.transport.channel import CONTROL_DEADLINE_SECONDS, translate
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import StoreUnavailableError

__all__ = ["StoreClientSync", "StoreReaderSync", "StoreWriterSync"]

# The pause before the client calls WatchJob again, after the connection of a watch broke.
_PAUSE_SECONDS = 0.1


class StoreClientSync:
    """A connection to a store daemon, over which a program lists jobs and opens readers and writers of them."""

    def __init__(self, connection: Connection) -> None:
        """Make a client that uses `connection`. Users call `connect` instead."""
        self._connection = connection

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        credentials: Credentials | None = None,
        client: str | None = None,
        prefer_streams: bool = False,
        timeout: Timeout | Call = None,
    ) -> StoreClientSync:
        """Connect, and wait until the daemon answers.

        Args:
            address: `unix:/path/paramserver.sock` or `host:port`.
            credentials: token and TLS files to connect with; None: those that $PARAMSERVER_TOKEN_FILE and
                $PARAMSERVER_TLS_CA, _CERTIFICATE and _KEY name.
            client: name of this client, which operators of the daemon see; None: the host's name and the process id.
            prefer_streams: do not use the store's shared memory even if it can be mapped.
            timeout: deadline of the call in seconds, or as a timedelta, here and in all other calls; None: the default.

        Raises:
            ConfigError: the address is malformed, or the credentials cannot be used.
            UnauthenticatedError: the daemon does not know the token.
            StoreUnavailableError: no daemon answered in time.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        name = client or f"{socket.gethostname()}, process {os.getpid()}"
        shown = Credentials.from_environment(os.environ) if credentials is None else credentials
        connection = Connection(address, name, shown, prefer_streams=prefer_streams)
        try:
            connection.resume(call, lambda session: None)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def __enter__(self) -> StoreClientSync:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def epoch(self) -> str:
        """The random name that the daemon gave itself at its start. It changes when the daemon is restarted.

        This is the name in the daemon's answer to the newest session that this client has opened.
        """
        return self._connection.epoch

    def close(self) -> None:
        """End all sessions, and with them all readers and writers that are still open. A repeated call has no effect.

        What was put and not committed is discarded. Each later call raises ConfigError.
        """
        self._connection.close()

    @property
    def maps_memory(self) -> bool:
        """Whether this client copies tensors from and to the daemon's shared memory. If not, gRPC sends them.

        Only a client on the daemon's node can use the shared memory.
        """
        return self._connection.maps_memory

    def list_jobs(self, *, timeout: Timeout | Call = None) -> list[StoredJob]:
        """Return the jobs that this client may read, sorted by name.

        Raises:
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        response = self._connection.resume(
            call, lambda session: session.call("ListStoredJobs", pb.ListStoredJobsRequest(), call)
        )
        return [StoredJob.from_proto(job) for job in response.jobs]

    def list_tensors(self, job: str, *, prefix: str = "", timeout: Timeout | Call = None) -> list[StoredTensor]:
        """Return the tensors of a job whose names begin with `prefix`, sorted by name.

        Raises:
            StoreNotFoundError: there is no such job.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        check_name("job", job)
        check_name("tensor", prefix)
        return self._connection.resume(call, lambda session: list_tensors(session, job, prefix, call))

    def open(
        self,
        job: str,
        tensors: Mapping[str, TensorSpec | torch.Tensor],
        *,
        durability: str = "step",
        placement: Placement = "nvme",
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        timeout: Timeout | Call = None,
    ) -> StoreWriterSync:
        """Open a job for writing, and create it if it does not exist.

        A job has one writer at a time, so the caller has to close it.

        Args:
            job: the job's name.
            tensors: the job's tensors by name, the same each time it is opened; a tensor stands for its shape and
                dtype.
            durability: "step" (each commit survives kill -9 and power loss), "snapshot:N" (every N-th does) or "none".
            placement: where the newest values are kept: "nvme", or "host" memory.
            shard_bytes: size in bytes of the shards that large tensors are cut into, the same each time the job is
                opened; smaller shards fit a smaller host budget of the daemon.
            timeout: deadline of the call in seconds, or as a timedelta.

        Raises:
            ConfigError: the store cannot keep such tensors, or an argument is malformed.
            JobConflictError: another client has the job open, or the job was stored with other tensors, shards or
                durability.
            StoreBudgetError: the store has no room for the job.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        check_name("job", job)
        specs = {fqn: TensorSpec.given(fqn, tensor) for fqn, tensor in tensors.items()}
        layout = JobLayout(name=job, tensors=specs, durability=durability, placement=placement, shard_bytes=shard_bytes)
        return StoreWriterSync(self._connection, layout, call)

    def read(
        self, job: str, *, step: int | None = None, settled: bool = True, timeout: Timeout | Call = None
    ) -> StoreReaderSync:
        """Open a reader of a committed step of a job, the newest settled one by default.

        The store keeps the step until the caller closes the reader, whatever is committed meanwhile.

        Args:
            job: the job's name.
            step: number of the step; None: the newest one that all nodes of the job are known to have. If all ranks of
                the job are attached to this store, and for jobs of a StoreClient, this is the newest committed step.
            settled: without `step`, False: the newest step that this store has committed. Other nodes may lack this
                step, and then the job goes on from an earlier one.
            timeout: deadline of the call in seconds, or as a timedelta.

        Raises:
            StoreNotFoundError: there is no such job, or the store does not hold that step any more.
            JobConflictError: the job has no such step yet.
            StoreBudgetError: the store has no room to keep the step beside later ones.
            DataLossError: some bytes of the step are damaged.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        return StoreReaderSync(self._connection, job, step, Call.of(timeout, CONTROL_DEADLINE_SECONDS), settled=settled)

    def read_layout(self, job: str, layout: str, step: int, *, timeout: Timeout | Call = None) -> StoreReaderSync:
        """Open a reader of the step that the job has stored in a given layout, which may not be its newest layout.

        The errors are those of `read`.
        """
        return StoreReaderSync(self._connection, job, step, Call.of(timeout, CONTROL_DEADLINE_SECONDS), layout)

    def read_kept(self, job: str, kept: str, *, timeout: Timeout | Call = None) -> StoreReaderSync:
        """Open a reader of the job's kept step that has the name `kept`. The errors are those of `read`."""
        return StoreReaderSync(self._connection, job, None, Call.of(timeout, CONTROL_DEADLINE_SECONDS), kept=kept)

    def watch(self, job: str, *, settled: bool = True, timeout: Timeout | Call = None) -> Iterator[Commit]:
        """Yield the newest settled step of a job, if there is one, then each step as it is settled.

        If several steps are settled before the caller asks for the next one, only the newest of them is yielded.

        Args:
            job: the job's name.
            settled: False: yield steps as soon as this store has committed them, although other nodes may lack them.
            timeout: how long the daemon may be unreachable, in seconds or as a timedelta. It does not limit how long
                the watch waits for a commit.

        Raises:
            StoreNotFoundError: there is no such job, or it was deleted.
            StoreTimeoutError, StoreUnavailableError: the daemon was away for too long.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        check_name("job", job)
        return self._watch(call, job, settled=settled)

    def _watch(self, call: Call, job: str, *, settled: bool) -> Iterator[Commit]:
        # The caller may ask the iterator of `watch` for its first commit long after the call of `watch`, so the
        # time-out begins only here.
        call.extend()
        seen: tuple[int, float] | None = None
        while True:
            session = self._connection.resume(call, lambda session: session)
            responses = session.watch(job, call, settled=settled)
            try:
                for response in responses:
                    commit = Commit.from_proto(response.newest)
                    if seen != (commit.step, commit.committed_at_unix_seconds):
                        seen = commit.step, commit.committed_at_unix_seconds
                        yield commit
            except grpc.RpcError as error:
                # The time-out begins anew at each break of the connection, because it limits how long the daemon is
                # unreachable, and not how long the watch waits for a commit.
                call.extend()
                failure = translate(error)
                if not isinstance(failure, StoreUnavailableError) and session.is_known(call):
                    raise failure from None
            finally:
                responses.cancel()
            call.pause(_PAUSE_SECONDS)
