"""A rank that trains a layout over a network with the client's RankStore, and compares its bytes with torch's."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from paramserver import vocabulary
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind
from tests.integration.support.store_client import group_to_wire, job_fields
from tests.unit.storage.builders import GRAD_SCALE, Layout, reference_of
from trainer_client.client.transport.journal import GroupUpdate, SlabName
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.rank_store import RankStore


class RemoteRank:
    """A rank with a session whose bytes travel in streams. Use it as a context manager."""

    def __init__(self, address: str, layout: Layout) -> None:
        self.layout = layout
        self.store = RankStore(address, "remote", prefer_streams=True)
        self._reference = reference_of(layout)

    def __enter__(self) -> RemoteRank:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.store.close()

    def open(self) -> Sequence[pb.CommittedStep]:
        """Open the job and register its groups; return the committed steps."""
        request = pb.OpenJobRequest(
            run_id=secrets.token_hex(8), resume=pb.RESUME_POLICY_AUTO, **job_fields(self.layout)
        )
        committed = self.store.job.open(request).committed
        self.store.job.register_shards([group_to_wire(self.layout.group(name)) for name in self.layout.groups])
        return committed

    def begin(self) -> RemoteRank:
        """Open the job as a new one, and commit its initial values."""
        assert not self.open()
        for group in self.layout.groups:
            leased = self._lease(group, self.layout.weight_kind, step=0)
            initial = [self._reference.initial(group, index) for index in range(len(self.layout.shards))]
            self._fill(leased, self.layout.weight_kind, initial)
            self.store.leases.publish([leased])
        self.store.steps.commit(0, b"", 0, wait_for_copies=lambda: None).wait()
        return self

    def gradient(self, step: int, group: str) -> LeasedBytes:
        """Acquire a lease for a gradient, and fill its local buffer."""
        leased = self._lease(group, Kind.GRAD, step=step)
        shards = range(len(self.layout.shards))
        self._fill(leased, Kind.GRAD, [self._reference.gradient(step, group, index) for index in shards])
        return leased

    def apply(self, step: int, group: str, gradient: LeasedBytes) -> None:
        """Send a gradient to the store, and start the group's update with it."""
        hyper: list[pb.ApplyGradientsRequest.HyperParameters] = []
        indexes: list[int] = []
        for index in range(len(self.layout.shards)):
            values = self.layout.hyper_parameters(step, index)
            indexes.append(-1 if values is None else len(hyper))
            if values is not None:
                hyper.append(values)
        update = GroupUpdate(group=group, gradient=gradient, scale=GRAD_SCALE, hyper_parameters_of_shard=indexes)
        self.store.gradients.apply(step, hyper, [update])

    def train(self, step: int) -> None:
        """Train and commit one step."""
        for group in self.layout.groups:
            self.apply(step, group, self.gradient(step, group))
        self.store.steps.commit(step, b"", step, wait_for_copies=lambda: None).wait()

    def assert_at(self, step: int) -> None:
        """Check that the newest bytes are those of torch after `step`."""
        for group in self.layout.groups:
            for kind in self.layout.kinds:
                (leased,) = self.store.leases.acquire_read(
                    [SlabName(group=group, kind=vocabulary.KIND_TO_WIRE[kind])], 0
                ).wait()
                assert leased.version == step
                stored = leased.data.view(self.layout.dtype(kind).torch)
                for shard in self.layout.group(group).shards:
                    expected = self._reference.states(step)[group, shard.fqn, kind]
                    assert torch.equal(stored[shard.group_offset :][: shard.numel], expected), (shard.fqn, kind)
                self.store.leases.release([leased]).wait()

    def _lease(self, group: str, kind: Kind, *, step: int) -> LeasedBytes:
        slab = SlabName(group=group, kind=vocabulary.KIND_TO_WIRE[kind])
        if kind is Kind.GRAD:
            leased = self.store.gradients.acquire(slab, step).wait()
        else:
            (leased,) = self.store.leases.acquire_write([slab], step).wait()
        leased.data.zero_()
        return leased

    def _fill(self, leased: LeasedBytes, kind: Kind, values: Sequence[torch.Tensor]) -> None:
        tensor = leased.data.view(self.layout.dtype(kind).torch)
        for shard, value in zip(self.layout.shards, values, strict=True):
            tensor[shard.group_offset :][: shard.numel] = value
