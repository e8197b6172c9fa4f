"""A job as one rank opens it: declared, filled or rolled back, and made into the parts of an engine.

Owns the order of things. Must never train: what it makes is the engine's.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from torch import nn

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client import client_state
from trainer_client.collectives import Collectives
from trainer_client.config import TrainingConfig
from trainer_client.errors import StoreNotFoundError
from trainer_client.flat_group import PROTO_DTYPES, FlatGroup, Placement
from trainer_client.gather import CollectiveGather, Gather, OneSidedGather
from trainer_client.initial_values import stage_initial_values
from trainer_client.link.rank_store import RankStore
from trainer_client.optimizer import StoreOptimizer
from trainer_client.origin import Origin
from trainer_client.parameters import ModelParameter
from trainer_client.precision import PrecisionPolicy
from trainer_client.relayout import fill
from trainer_client.resume import Start, carried_state, find_start, name_layout
from trainer_client.states import StoredStates
from trainer_client.unit_policy import UnitSpec, find_units
from trainer_client.units import Unit

log = logging.getLogger(__name__)

ROOT_NAME = "(root)"

_ID_BYTES = 16

_TIERS: Mapping[str, pb.Tier] = {"cpu": pb.TIER_HOST, "nvme": pb.TIER_NVME}
_RESUME_POLICIES: Mapping[str, pb.ResumePolicy] = {
    "auto": pb.RESUME_POLICY_AUTO,
    "never": pb.RESUME_POLICY_NEVER,
    # What is not on this node may be on others.
    "must": pb.RESUME_POLICY_AUTO,
}


class Job:
    """A job that this rank has opened.

    Attributes:
        units: the root first.
        states: this rank's chunks, in the units' order.
        gather: how the units' parameters come together.
        sharers: how many ranks use the same store.
        resumed_step: the commit that the run starts from; None for a new job.
        resumed_state: what that commit carried for this rank; None for a new job.
        is_staged: the states that the run starts from are staged and not committed: those of a new job, or of one that
            is laid out anew.
    """

    def __init__(
        self,
        settings: TrainingConfig,
        model: nn.Module,
        parameters: Sequence[ModelParameter],
        optimizer: StoreOptimizer,
        store: RankStore,
        collectives: Collectives,
    ) -> None:
        """A collective."""
        self._settings = settings
        self._parameters = parameters
        self._optimizer = optimizer
        self._store = store
        self._collectives = collectives
        self._policy = PrecisionPolicy.of(settings)
        # Ranks that see the same start of a daemon share a store.
        epoch = hashlib.sha256(store.epoch.encode()).digest()[:_ID_BYTES]
        self._store_ranks = [rank for rank, e in enumerate(collectives.gather_ids(epoch)) if e == epoch]
        self.sharers = len(self._store_ranks)
        self.gather = self._choose_gather()
        self.units = [self._unit(i, spec) for i, spec in enumerate(find_units(model, parameters))]
        self.states = [StoredStates(group, store) for unit in self.units for group in unit.groups]

        groups = [state.group for state in self.states]
        layout = name_layout(groups, collectives)
        opened = self._open(layout)
        section = settings.paramserver
        start = find_start(section.job, layout, opened.layouts, groups, store, section.peers, collectives)
        self.resumed_step = None if start is None else start.step
        self.resumed_state: dict[str, Any] | None = None
        self.is_staged = start is None or not start.fits
        if start is None:
            self._begin()
        elif start.fits:
            encoded = next(commit.client_state for commit in opened.committed if commit.step == start.step)
            self.resumed_state = client_state.decode(encoded)
            self._register()
            self._roll_back(start.step)
        else:
            self.resumed_state = self._lay_out(start)
        for unit in self.units:
            for group in unit.groups:
                group.take_over()
        _move_buffers(model, collectives)

    def _choose_gather(self) -> Gather:
        ranks = self._collectives.world_size
        # In host memory, a copy from the arena is faster than any collective.
        (far,) = self._collectives.any_rank([self.sharers != ranks or self._store.plane.name != "arena"])
        if ranks > 1 and not far and self._collectives.device.type == "cpu":
            return OneSidedGather(self._store, ranks)
        return CollectiveGather(self._store, self._collectives)

    def _unit(self, index: int, spec: UnitSpec) -> Unit:
        groups = [
            FlatGroup(
                unit=spec.fqn or ROOT_NAME,
                parameters=members,
                dtype=self._policy.compute_dtype,
                trainable=trainable,
                state_kinds=self._optimizer.state_kinds,
                rank=self._collectives.rank,
                world_size=self._collectives.world_size,
                device=self._collectives.device,
            )
            for trainable in (True, False)
            if (members := [p for p in spec.parameters if p.tensor.requires_grad == trainable])
        ]
        return Unit(index=index, spec=spec, groups=groups, gather=self.gather, store=self._store)

    def _open(self, layout: str) -> pb.OpenJobResponse:
        """Attaches to the job; what is committed of it."""
        section = self._settings.paramserver
        dtype = PROTO_DTYPES[self._policy.compute_dtype]
        return self._store.open_job(
            pb.OpenJobRequest(
                job=section.job,
                run_id=self._collectives.broadcast_id(secrets.token_bytes(_ID_BYTES)).hex(),
                rank=self._collectives.rank,
                world_size=self._collectives.world_size,
                attached_ranks=self.sharers,
                parameters=[
                    pb.Parameter(fqn=p.fqn, shape=p.shape, dtype=dtype, trainable=p.tensor.requires_grad)
                    for p in self._parameters
                ],
                durability=_durability(section.durability),
                resume=_RESUME_POLICIES[section.resume],
                layout=layout,
            )
        )

    def _begin(self) -> None:
        """Stages the initial values of a new job. A collective."""
        section = self._settings.paramserver
        if section.resume == "must":
            raise StoreNotFoundError(
                grpc.StatusCode.NOT_FOUND,
                f"job {section.job!r} has no committed step to resume from, and paramserver.resume is 'must'",
            )
        self._register()
        stage_initial_values(self.states, self._collectives)

    def _lay_out(self, start: Start) -> dict[str, Any]:
        """Stages what another layout holds; the state that goes with it. A collective."""
        section = self._settings.paramserver
        if self._collectives.rank == 0:
            log.info("job %r goes on from step %d with another layout of its shards", section.job, start.step)
        self._store.begin_layout(start.step + 1)
        self._register()
        with Origin(
            job=section.job,
            layout=start.layout,
            step=start.step,
            stores=start.stores,
            credentials=self._store.credentials,
        ) as origin:
            fill(self.states, origin, start.fresh, start.step + 1)
            return carried_state(origin, start, self._parameters, self._collectives.rank)

    def _register(self) -> None:
        """Declares this rank's shard groups."""
        zero = self._settings.zero_optimization
        placement = Placement(param=_TIERS[zero.offload_param.device], optimizer=_TIERS[zero.offload_optimizer.device])
        self._store.register_shards(group.to_proto(placement) for unit in self.units for group in unit.groups)

    def _roll_back(self, step: int) -> None:
        """Makes `step` the newest one of every store. A collective."""
        if self._store_ranks[0] == self._collectives.rank:
            self._store.roll_back(step)
        self._collectives.barrier()
        if self._collectives.rank == 0:
            log.info("job %r resumes from step %d", self._settings.paramserver.job, step)


def _durability(text: str) -> pb.Durability:
    durability = pb.Durability()
    name, _, every = text.partition(":")
    if name == "snapshot":
        durability.snapshot.every_steps = int(every)
    else:
        getattr(durability, name).SetInParent()
    return durability


def _move_buffers(model: nn.Module, collectives: Collectives) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(collectives.device))
