"""The store for programs that do not train: tensors that are put, committed as steps, and read back, call by call.

The synchronous face, for scripts; `store_client` has the same for asyncio and stands on this one. All calls may come
from several threads. Every one has a deadline; what can be done twice goes on by itself after a break of the connection
or a restart of the daemon, with jittered pauses.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

import grpc
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import StoreUnavailableError
from trainer_client.store_client.connection import Call, Connection, Timeout
from trainer_client.store_client.job_layout import JobLayout
from trainer_client.store_client.reader import StoreReaderSync, list_tensors
from trainer_client.store_client.types import Commit, Placement, StoredJob, StoredTensor, TensorSpec
from trainer_client.store_client.writer import DEFAULT_SHARD_BYTES, StoreWriterSync
from trainer_client.transport.channel import CONTROL_DEADLINE_SECONDS, translate
from trainer_client.transport.credentials import Credentials

__all__ = ["StoreClientSync", "StoreReaderSync", "StoreWriterSync"]

# Before a watch that broke is begun again.
_PAUSE_SECONDS = 0.1


class StoreClientSync:
    """A connection to a store daemon."""

    def __init__(self, connection: Connection) -> None:
        """For `connect`."""
        self._connection = connection

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        credentials: Credentials | None = None,
        client: str | None = None,
        prefer_streams: bool = False,
        timeout: Timeout = None,
    ) -> StoreClientSync:
        """Waits until the daemon answers.

        Args:
            address: `unix:/path/paramserver.sock` or `host:port`.
            credentials: what to show to the daemon; else what $PARAMSERVER_TOKEN_FILE and $PARAMSERVER_TLS_CA,
                _CERTIFICATE and _KEY name.
            client: who we are, for people; else the host and the process.
            prefer_streams: leave the store's shared memory alone even where it can be mapped.
            timeout: seconds, or a timedelta; as everywhere here.

        Raises:
            ConfigError: the address is none, or the credentials cannot be used.
            UnauthenticatedError: the daemon knows no such token.
            StoreUnavailableError: no daemon answered in time.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        return cls.connect_within(call, address, credentials, client, prefer_streams=prefer_streams)

    @classmethod
    def connect_within(
        cls, call: Call, address: str, credentials: Credentials | None, client: str | None, *, prefer_streams: bool
    ) -> StoreClientSync:
        """`connect`, as a part of a call."""
        name = client or f"{socket.gethostname()}, process {os.getpid()}"
        shown = Credentials.from_environment(os.environ) if credentials is None else credentials
        connection = Connection(address, name, shown, prefer_streams=prefer_streams)
        try:
            connection.resume(call, lambda link: None)
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
        """Tells this start of the daemon from all others, of this daemon and others, when a session was opened last."""
        return self._connection.epoch

    def close(self) -> None:
        """Ends the session, and with it readers that are open still. Jobs that were opened are closed by themselves."""
        self._connection.close()

    @property
    def maps_memory(self) -> bool:
        """Whether the daemon is on this node, so that tensors are copied from and to its memory; else they are sent."""
        return self._connection.maps_memory

    def list_jobs(self, *, timeout: Timeout = None) -> list[StoredJob]:
        """The jobs that we may read, by name.

        Raises:
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        return self.list_jobs_within(Call(timeout, CONTROL_DEADLINE_SECONDS))

    def list_jobs_within(self, call: Call) -> list[StoredJob]:
        """`list_jobs`, as a part of a call."""
        response = self._connection.resume(
            call, lambda link: link.call("ListStoredJobs", pb.ListStoredJobsRequest(), call)
        )
        return [StoredJob.from_proto(job) for job in response.jobs]

    def list_tensors(self, job: str, *, prefix: str = "", timeout: Timeout = None) -> list[StoredTensor]:
        """The tensors of a job whose names begin with `prefix`, by name.

        Raises:
            StoreNotFoundError: there is no such job.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        return self.list_tensors_within(Call(timeout, CONTROL_DEADLINE_SECONDS), job, prefix)

    def list_tensors_within(self, call: Call, job: str, prefix: str) -> list[StoredTensor]:
        """`list_tensors`, as a part of a call."""
        return self._connection.resume(call, lambda link: list_tensors(link, job, prefix, call))

    def open(
        self,
        job: str,
        tensors: Mapping[str, TensorSpec | torch.Tensor],
        *,
        durability: str = "step",
        placement: Placement = "nvme",
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        timeout: Timeout = None,
    ) -> StoreWriterSync:
        """Opens a job for writing, alone, and creates it if it is not there. To be closed by the caller.

        Args:
            tensors: what the job is made of, always the same; a tensor stands for its shape and type.
            durability: "step" (each commit survives kill -9 and power loss), "snapshot:N" (every N-th does) or "none".
            placement: where the newest values are at home: "nvme", or "host" memory.
            shard_bytes: how large the pieces are in which tensors are stored, always the same; smaller ones fit a
                smaller host budget of the daemon.

        Raises:
            ConfigError: an argument asks for what the store cannot keep.
            JobConflictError: somebody else has it open, or it was stored with other tensors, pieces or durability.
            StoreBudgetError: the store has no room for the job.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)
        return self.open_within(call, job, tensors, durability=durability, placement=placement, shard_bytes=shard_bytes)

    def open_within(
        self,
        call: Call,
        job: str,
        tensors: Mapping[str, TensorSpec | torch.Tensor],
        *,
        durability: str,
        placement: Placement,
        shard_bytes: int,
    ) -> StoreWriterSync:
        """`open`, as a part of a call."""
        specs = {
            fqn: TensorSpec.of(tensor) if isinstance(tensor, torch.Tensor) else tensor
            for fqn, tensor in tensors.items()
        }
        layout = JobLayout(name=job, tensors=specs, durability=durability, placement=placement, shard_bytes=shard_bytes)
        return StoreWriterSync(self._connection, layout, call)

    def read(self, job: str, *, step: int | None = None, timeout: Timeout = None) -> StoreReaderSync:
        """Holds a committed step of a job, the newest one by default. To be closed by the caller.

        Raises:
            StoreNotFoundError: there is no such job, or the store does not hold that step any more.
            JobConflictError: the job has no committed step yet.
            StoreBudgetError: the store has no room to keep the step beside those to come.
            DataLossError: some of its bytes are gone.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        return self.read_within(Call(timeout, CONTROL_DEADLINE_SECONDS), job, step)

    def read_within(self, call: Call, job: str, step: int | None) -> StoreReaderSync:
        """`read`, as a part of a call."""
        return StoreReaderSync(self._connection, job, step, call)

    def read_layout(self, job: str, layout: str, step: int, *, timeout: Timeout = None) -> StoreReaderSync:
        """As `read`, in a layout of the job that may have been replaced already. Raises as `read`."""
        return StoreReaderSync(self._connection, job, step, Call(timeout, CONTROL_DEADLINE_SECONDS), layout)

    def watch(self, job: str, *, timeout: Timeout = None) -> Iterator[Commit]:
        """The newest committed step of a job, if there is one, then each one as it is committed, or the newest of them
        where several were while we were busy.

        Args:
            timeout: how long the daemon may be away; else it is waited for, however long nothing is committed.

        Raises:
            StoreNotFoundError: there is no such job, or it was deleted.
            StoreTimeoutError, StoreUnavailableError: the daemon was away for too long.
        """
        return self.watch_within(Call(timeout, CONTROL_DEADLINE_SECONDS), job)

    def watch_within(self, call: Call, job: str) -> Iterator[Commit]:
        """`watch`, as a part of a call."""
        seen: tuple[int, float] | None = None
        while True:
            link = self._connection.resume(call, lambda link: link)
            responses = link.watch(job, call)
            try:
                for response in responses:
                    commit = Commit.from_proto(response.newest)
                    if seen != (commit.step, commit.committed_at_unix_seconds):
                        seen = commit.step, commit.committed_at_unix_seconds
                        yield commit
            except grpc.RpcError as error:
                # However long nothing was committed: what counts is how long the daemon is away.
                call.extend()
                failure = translate(error)
                if not isinstance(failure, StoreUnavailableError) and link.is_known(call):
                    raise failure from error
            finally:
                responses.cancel()
            call.pause(_PAUSE_SECONDS)
