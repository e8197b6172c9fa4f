"""The layout of a planned job, made on the meta device by the training code: units, flat groups, placement.

This module computes the figures that follow from the layout alone, so they are exact. It must never estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from paramserver.contract.store_need import FindNeed, RefusedJobError, StoreNeed
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.device import CPU
from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError
from trainer_client.training.model.buffers import cast_buffers
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.gather import is_one_sided
from trainer_client.training.model.large_buffers import can_store, entries_of, group_of, planned_numel
from trainer_client.training.model.leaves import mark_configured_leaves
from trainer_client.training.model.parameters import ModelParameter, list_parameters
from trainer_client.training.model.placement import GroupPlacement, PlacementPolicy, Residence
from trainer_client.training.model.plain_state import PlainState
from trainer_client.training.model.states import placement_bytes
from trainer_client.training.model.tiling import Tiling
from trainer_client.training.model.unit_policy import choose_policy, find_units
from trainer_client.training.run.declaration import assign, flat_groups, open_request
from trainer_client.training.step.precision import PrecisionPolicy
from trainer_client.training.store_optimizer import make_optimizer

META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a job: `ranks` ranks on each of `nodes` nodes. Each node has one store."""

    ranks: int
    nodes: int = 1

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.ranks * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A flat group, as rank 0 has it, and the homes that the config gives its parameters, gradient and states."""

    group: FlatGroup
    placement: GroupPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit:
    """A unit of the planned model, with its flat groups.

    Attributes:
        fqn: the unit's name; "" is the root.
        groups: the unit's flat groups.
        is_tile: whether the unit is a tile of a parameter.
        uses: the number of modules that compute with the unit; it is above 1 for a tile of a tied weight.
    """

    fqn: str
    groups: tuple[PlannedGroup, ...]
    is_tile: bool = False
    uses: int = 1

    @property
    def whole_bytes(self) -> int:
        """The bytes that the unit's flat buffers take while the unit is gathered."""
        return sum(planned.group.whole_bytes for planned in self.groups)

    @property
    def first_index(self) -> int:
        """The index of the unit's first parameter in the model's order; -1 if the unit has no parameter."""
        return min((p.index for planned in self.groups for p in planned.group.parameters), default=-1)

    @property
    def first_trained(self) -> int | None:
        """The index of the unit's first trained parameter in the model's order; None if it has none."""
        trained = [p.index for planned in self.groups if planned.group.trainable for p in planned.group.parameters]
        return min(trained, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout that `initialize` would give a job.

    Attributes:
        parameters: the number of elements of the model, without padding.
        units: the units, the root first.
        buffer_bytes: the bytes of the model's buffers, which each rank has on its device.
        request: the request with which a rank of the first node would open the job.
        declared: the shard groups that the ranks of the first node would register, those of their large buffers
            included.
    """

    world: World
    parameters: int
    units: tuple[PlannedUnit, ...]
    buffer_bytes: int
    request: pb.OpenJobRequest
    declared: tuple[pb.ShardGroup, ...]

    @property
    def groups(self) -> list[PlannedGroup]:
        """The flat groups of all units, in the order in which a forward uses the units."""
        return list(chain.from_iterable(unit.groups for unit in self.units))

    @property
    def residence(self) -> Residence:
        """Whether each rank keeps a partition of each group (SHARDED), or the whole group (REPLICATED)."""
        return self.groups[0].placement.residence

    def rank_bytes(self) -> dict[str, dict[str, int]]:
        """Return one rank's bytes of parameters, gradients and optimizer by home, as `engine.placement()` does."""
        return placement_bytes(self.groups)

    def store_need(self, find_need: FindNeed, host_budget: int, boundaries: Sequence[int] = ()) -> StoreNeed:
        """Return the bytes that the job takes in the first node's store.

        Args:
            find_need: the daemon's function that computes the bytes that a job takes.
            host_budget: the bytes of the store's host budget.
            boundaries: the bytes of each boundary that a rank moves to the store in a forward; see Rehearsal.

        Raises:
            ConfigError: the store would refuse the job.
        """
        try:
            return find_need(self.request, self.declared, host_budget, boundaries)
        except RefusedJobError as error:
            raise ConfigError(f"a store would refuse the job: {error}") from None


def lay_out(model: nn.Module, config: TrainingConfig, world: World) -> Layout:
    """Return the layout of a model whose parameters have no memory.

    The buffers of the model get the dtype that the config asks for.

    Raises:
        ConfigError: `initialize` would refuse the model or the config, too.
    """
    parameters = list_parameters(model)
    section = config.paramserver
    if config.optimizer is None:
        raise ConfigError(
            "the config names no optimizer, so its states cannot be counted: if the script passes one, write its type "
            'for the plan, as in {"optimizer": {"type": "AdamW"}}'
        )
    optimizer = make_optimizer(None, config.optimizer, None, parameters, section.may_thaw)
    precision = PrecisionPolicy.of(config)
    mark_configured_leaves(model, config.zero_optimization)
    precision.mark_reductions(model)
    cast_buffers(model, precision.buffer_dtype)
    host_budget = int(section.host_budget)
    tiling = Tiling.of(model, parameters, config, precision.dtype_of, host_bytes=host_budget, is_loud=False)
    specs = tiling.cut(find_units(model, parameters, choose_policy(section.units, None)))

    def groups_of(rank: int) -> list[list[FlatGroup]]:
        size = world.size
        return [flat_groups(s, optimizer, precision, rank=rank, world_size=size, device=META) for s in specs]

    def placed(groups: Sequence[Sequence[FlatGroup]]) -> dict[str, GroupPlacement]:
        return assign(list(chain.from_iterable(groups)), PlacementPolicy.of(config))

    first = groups_of(0)
    placement = placed(first)
    declared = []
    for rank in range(world.ranks):
        groups = first if rank == 0 else groups_of(rank)
        homes = placed(groups)
        declared += [group.to_proto(homes[group.name]) for group in chain.from_iterable(groups)]
    slabs = _slabs_of_buffers(model, parameters) * world.size
    declared += [group_of(rank, numel) for rank, numel in enumerate(slabs[: world.ranks])]
    request = open_request(
        parameters,
        optimizer,
        precision,
        job=section.job,
        run_id="plan",
        rank=0,
        world_size=world.size,
        attached_ranks=world.ranks,
        durability=section.durability,
        resume=pb.RESUME_POLICY_AUTO,
        layout="plan",
        buffers=entries_of(slabs),
    )
    return Layout(
        world=world,
        parameters=sum(parameter.shape.numel() for parameter in parameters),
        units=tuple(
            PlannedUnit(
                fqn=spec.fqn,
                groups=tuple(PlannedGroup(group=group, placement=placement[group.name]) for group in groups),
                is_tile=spec.tile is not None,
                uses=1 + len(spec.other_uses),
            )
            for spec, groups in zip(specs, first, strict=True)
        ),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        request=request,
        declared=tuple(declared),
    )


def _slabs_of_buffers(model: nn.Module, parameters: Sequence[ModelParameter]) -> list[int]:
    """Return the elements of a rank's slab of large buffers, as a list of one number; [] if there are none.

    Large buffers are those that do not fit into the client state of a commit. training/run/job.py chooses them in the
    same way.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    left_out = PlainState(model, parameters).to_commit()["left_out"]
    # Whether a buffer can be stored depends only on its dtype. The buffers of a plan have no values, so an empty tensor
    # is tested in their place.
    large = {
        name: buffers[name]
        for name in left_out
        if name in buffers and can_store(torch.empty(0, dtype=buffers[name].dtype, device=CPU))
    }
    return [planned_numel(large)] if large else []


def gathers_one_sided(layout: Layout, config: TrainingConfig, *, is_cpu: bool) -> bool:
    """Return whether each rank reads all ranks' partitions from its store's memory; see `is_one_sided`.

    It can raise ConfigError.
    """
    return is_one_sided(
        config.paramserver.gather,
        far="the ranks are on several nodes" if layout.world.nodes > 1 else None,
        parameters_on_device=Home.DEVICE in PlacementPolicy.of(config).parameters,
        on_cpu=is_cpu,
    )
