"""A small client of the wire contract, for tests: a session, leases in the mapped arena, and a comparison with torch.

It uses the generated stubs, not the training library. The jobs and the reference are those of the engine's tests.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from paramserver import vocabulary
from paramserver.contract.capabilities import CAPABILITIES
from paramserver.contract.channel import channel_to
from paramserver.contract.sockets import system_path
from paramserver.rpc import convert
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from storage.base.shard import GroupSpec, Kind
from tests.integration.support.daemon import CHANNEL_OPTIONS
from tests.unit.storage.builders import GRAD_SCALE, Layout, Reference, reference_of

CALL_SECONDS = 20.0
CLOSE_SECONDS = 2.0


class Client:
    """One session, which sends heartbeats unless it is `silent`. It uses `channel` if that is given."""

    def __init__(
        self,
        address: str,
        name: str = "test",
        *,
        silent: bool = False,
        registers_arena: bool = False,
        channel: grpc.Channel | None = None,
        capabilities: Sequence[str] = CAPABILITIES,
    ) -> None:
        self.channel = channel or channel_to(address, options=CHANNEL_OPTIONS)
        self.store = pb_grpc.ParameterStoreStub(self.channel)
        self.admin = admin_grpc.StoreAdminStub(self.channel)
        self.notices: list[str] = []
        self.ended = threading.Event()
        self._outgoing: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        hello = pb.SessionRequest.Hello(client=name, registers_arena=registers_arena, capabilities=capabilities)
        self._outgoing.put(pb.SessionRequest(hello=hello))
        # The call waits for a connection, because the first attempt may time out on a busy machine.
        self._stream = self.store.Session(iter(self._outgoing.get, None), wait_for_ready=True)
        self.welcome: pb.SessionResponse.Welcome = next(self._stream).welcome
        self.session_id = self.welcome.session_id
        self.arena: mmap.mmap | None = None
        self._threads = [threading.Thread(target=self._listen)]
        if not silent:
            self._threads.append(threading.Thread(target=self._beat))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the session; a second call does nothing."""
        self._outgoing.put(None)
        # If the channel were closed before the daemon sees the end of the stream, the daemon would keep the session, as
        # it does after a broken connection.
        self.ended.wait(CLOSE_SECONDS)
        self.channel.close()
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def map_arena(self) -> mmap.mmap:
        """Map the arena by the descriptor that its socket sends, and return the mapping."""
        if self.arena is None:
            with socket.socket(socket.AF_UNIX) as arena_socket:
                arena_socket.connect(system_path(Path(self.welcome.arena.socket_path)))
                _, (descriptor,), _, _ = socket.recv_fds(arena_socket, 1, 1)
            self.arena = mmap.mmap(descriptor, self.welcome.arena.size_bytes)
            os.close(descriptor)
            assert self.arena[: len(self.welcome.arena.nonce)] == self.welcome.arena.nonce
        return self.arena

    def call(self, method: str, *, seconds: float = CALL_SECONDS, **fields: Any) -> Any:
        """Make a unary call of ParameterStore with this session's id, and return its response."""
        request = getattr(pb, f"{method}Request")(session_id=self.session_id, **fields)
        return getattr(self.store, method)(request, timeout=seconds)

    def _listen(self) -> None:
        try:
            for response in self._stream:
                if response.WhichOneof("message") == "notice":
                    self.notices.append(response.notice.text)
        except grpc.RpcError:
            pass
        self.ended.set()

    def _beat(self) -> None:
        while not self.ended.wait(self.welcome.heartbeat_interval_millis / 1000):
            self._outgoing.put(pb.SessionRequest(heartbeat=pb.Heartbeat()))


class Rank(Client):
    """A session that trains a part of a layout's groups as one rank."""

    def __init__(
        self,
        address: str,
        layout: Layout,
        *,
        rank: int = 0,
        ranks: int = 1,
        run_id: str = "run",
        name: str = "test",
        registers_arena: bool = False,
        channel: grpc.Channel | None = None,
    ) -> None:
        super().__init__(address, name, registers_arena=registers_arena, channel=channel)
        self.layout = layout
        self.rank, self.ranks, self.run_id = rank, ranks, run_id
        self.groups = layout.groups[rank::ranks]
        self.reference: Reference = reference_of(layout)

    def begin(self) -> Rank:
        """Open the job as a new one, and commit its initial values."""
        self.open()
        self.register()
        self.stage_all()
        self.commit(0)
        return self

    def resume(self) -> int:
        """Open the job and register the groups; return the newest committed step."""
        committed = self.open(pb.RESUME_POLICY_MUST)
        self.register()
        assert committed[-1].client_state == f"{self.rank}:{committed[-1].step}".encode()
        return committed[-1].step

    def open(self, resume: pb.ResumePolicy = pb.RESUME_POLICY_AUTO, **changes: Any) -> Sequence[pb.CommittedStep]:
        """Open the job and return its committed steps; `changes` replace fields of the request."""
        fields = job_fields(self.layout) | {
            "run_id": self.run_id,
            "rank": self.rank,
            "world_size": self.ranks,
            "attached_ranks": self.ranks,
            "resume": resume,
        }
        committed: Sequence[pb.CommittedStep] = self.call("OpenJob", **(fields | changes)).committed
        return committed

    def register(self) -> None:
        """Register this rank's groups."""
        self.call("RegisterShards", groups=[group_to_wire(self.layout.group(name)) for name in self.groups])

    def acquire(self, group: str, kind: Kind, mode: pb.LeaseMode, *, step: int = 0, **fields: Any) -> pb.Lease:
        """Acquire one lease of a slab."""
        slab = pb.SlabName(group=group, kind=vocabulary.KIND_TO_WIRE[kind])
        want = pb.AcquireLeasesRequest.Want(slab=slab, mode=mode, step=step)
        (lease,) = self.call("AcquireLeases", wants=[want], **fields).leases
        assert isinstance(lease, pb.Lease)
        return lease

    def release(self, lease: pb.Lease, *, publish: bool = False) -> None:
        """Release a lease, and publish its bytes if asked to."""
        self.call("ReleaseLeases", releases=[pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id, publish=publish)])

    def tensor(self, lease: pb.Lease, kind: Kind) -> torch.Tensor:
        """Return a tensor over the leased bytes, which are shared with the daemon."""
        dtype = self.layout.dtype(kind).torch
        count = lease.size_bytes // dtype.itemsize
        return torch.frombuffer(self.map_arena(), dtype=dtype, count=count, offset=lease.arena_offset)

    def stage_all(self) -> None:
        """Write and publish the initial values of this rank's groups."""
        for group in self.groups:
            for kind in {Kind.PARAM, self.layout.weight_kind}:
                lease = self.acquire(group, kind, pb.LEASE_MODE_WRITE)
                self._fill(lease, kind, [self.reference.initial(group, i) for i in range(len(self.layout.shards))])
                self.release(lease, publish=True)

    def hand_over(self, step: int, *, provisional: bool = False) -> None:
        """Acquire, fill and hand over the gradients of this rank's groups."""
        for group in self.groups:
            lease = self.acquire(group, Kind.GRAD, pb.LEASE_MODE_WRITE, step=step)
            shards = range(len(self.layout.shards))
            self._fill(lease, Kind.GRAD, [self.reference.gradient(step, group, i) for i in shards])
            self.apply(step, lease, group=group, provisional=provisional)

    def apply(
        self, step: int, lease: pb.Lease, *, provisional: bool = False, final: bool = False, **changes: Any
    ) -> None:
        """Call ApplyGradients for one group; `changes` are fields of its update, among them the group's name."""
        hyper: list[pb.ApplyGradientsRequest.HyperParameters] = []
        indexes: list[int] = []
        for index in range(len(self.layout.shards)):
            values = self.layout.hyper_parameters(step, index)
            indexes.append(-1 if values is None else len(hyper))
            if values is not None:
                hyper.append(values)
        fields: dict[str, Any] = {
            "grad_lease_id": lease.lease_id,
            "grad_scale": GRAD_SCALE,
            "hyper_parameters_of_shard": indexes,
        }
        update = pb.ApplyGradientsRequest.GroupUpdate(**(fields | changes))
        how = {"provisional": provisional, "final": final}
        self.call("ApplyGradients", step=step, hyper_parameters=hyper, updates=[update], **how)

    def commit(self, step: int, **fields: Any) -> bool:
        """Vote for the commit of a step, and return whether it is durable. All ranks have the step before."""
        fields.setdefault("settled_step", max(0, step - 1))
        response = self.call("CommitStep", step=step, client_state=f"{self.rank}:{step}".encode(), **fields)
        return bool(response.durable)

    def train(self, first: int, last: int) -> None:
        """Train and commit the steps `first` to `last`."""
        for step in range(first, last + 1):
            self.hand_over(step)
            self.commit(step)

    def assert_at(self, step: int) -> None:
        """Check that this rank's newest bytes are those of torch after `step`."""
        different = []
        for group in self.groups:
            for kind in self.layout.kinds:
                lease = self.acquire(group, kind, pb.LEASE_MODE_READ)
                stored = self.tensor(lease, kind)
                for shard in self.layout.group(group).shards:
                    expected = self.reference.states(step)[group, shard.fqn, kind]
                    if not torch.equal(stored[shard.group_offset :][: shard.numel], expected):
                        different.append(f"{shard.fqn} {kind.value}")
                self.release(lease)
        assert different == [], f"not the bits of step {step}"

    def _fill(self, lease: pb.Lease, kind: Kind, values: Sequence[torch.Tensor]) -> None:
        tensor = self.tensor(lease, kind)
        for shard, value in zip(self.layout.shards, values, strict=True):
            tensor[shard.group_offset :][: shard.numel] = value


class Clients:
    """Sessions with one daemon that are closed together at the end of the context."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._opened: list[Client] = []

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for client in reversed(self._opened):
            client.close()

    def rank(self, layout: Layout, **fields: Any) -> Rank:
        """Open another session as a rank; see Rank."""
        rank = Rank(self._address, layout, **fields)
        self._opened.append(rank)
        return rank

    def client(self, **fields: Any) -> Client:
        """Open another session; see Client."""
        client = Client(self._address, **fields)
        self._opened.append(client)
        return client


def job_fields(layout: Layout) -> dict[str, Any]:
    """Return the fields of OpenJobRequest for a layout that one rank trains."""
    spec = layout.job()
    return {
        "job": spec.name,
        "rank": 0,
        "world_size": 1,
        "attached_ranks": 1,
        "parameters": [
            pb.Parameter(fqn=p.fqn, shape=p.shape, dtype=vocabulary.DTYPE_TO_WIRE[p.dtype], trainable=True)
            for p in spec.parameters
        ],
        "durability": convert.durability_to_wire(spec.durability),
    }


def group_to_wire(spec: GroupSpec) -> pb.ShardGroup:
    """Return the message by which a client registers a group."""
    return pb.ShardGroup(
        name=spec.name,
        numel=spec.numel,
        shards=[pb.Shard(fqn=s.fqn, offset=s.offset, numel=s.numel, position=s.group_offset) for s in spec.shards],
        kinds=[
            pb.KindSpec(
                kind=vocabulary.KIND_TO_WIRE[slab.kind],
                dtype=vocabulary.DTYPE_TO_WIRE[slab.dtype],
                placement=vocabulary.TIER_TO_WIRE[slab.placement],
                codec=slab.codec,
            )
            for slab in spec.slabs
        ],
    )


@contextmanager
def refused(code: grpc.StatusCode, *named: str) -> Iterator[None]:
    """Check that the call in the block ends with this status, and that its message contains all of `named`."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = caught.value
    assert isinstance(error, grpc.Call)
    details = error.details() or ""
    assert error.code() is code, details
    for text in named:
        assert text in details
