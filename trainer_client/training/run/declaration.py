"""The declaration of a job by a rank: its flat groups, their placement, and the request that opens the job.

The functions are pure functions of the model, the config and the number of ranks, so that `paramserver plan` computes a
job's bytes with the code that lays the job out. This module must never contact a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paramserver.contract.dtypes import WIRE_DTYPES
from paramserver.contract.durability import parse_durability
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import ROOT_NAME
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.placement import GroupPlacement, PlacementPolicy
from trainer_client.training.model.unit_policy import UnitSpec
from trainer_client.training.step.precision import PrecisionPolicy
from trainer_client.training.store_optimizer import StoreOptimizer


def flat_groups(
    spec: UnitSpec,
    optimizer: StoreOptimizer,
    policy: PrecisionPolicy,
    *,
    rank: int,
    world_size: int,
    device: torch.device,
) -> list[FlatGroup]:
    """Return the flat groups of a unit: one for each dtype, trainable parameters and frozen ones apart.

    Trainable parameters whose gradients are added over ranks in different dtypes are in different groups, too.

    On the meta device the groups take no memory.
    """
    members: dict[tuple[bool, torch.dtype, torch.dtype], list[ModelParameter]] = {}
    for parameter in spec.parameters:
        frozen, dtype = not optimizer.has_states(parameter), policy.dtype_of(parameter)
        reduction = dtype if frozen else policy.reduction_dtype_of(parameter)
        members.setdefault((frozen, dtype, reduction), []).append(parameter)
    usual = policy.compute_dtype or torch.float32
    return [
        FlatGroup(
            unit=spec.fqn or ROOT_NAME,
            parameters=members[frozen, dtype, reduction],
            dtype=dtype,
            reduction_dtype=reduction,
            gradient_dtype=policy.accumulation_dtype or dtype,
            suffix=_suffix(dtype, usual)
            + _suffix(reduction, dtype if frozen else policy.reduction_dtype or dtype, "reduced-"),
            trainable=not frozen,
            state_kinds=optimizer.state_kinds,
            rank=rank,
            world_size=world_size,
            device=device,
        )
        for frozen, dtype, reduction in sorted(members, key=str)
    ]


def _suffix(dtype: torch.dtype, usual: torch.dtype, prefix: str = "") -> str:
    """Return the end of a flat group's name, which names its dtype; "" for the `usual` dtype."""
    return "" if dtype is usual else f":{prefix}{str(dtype).removeprefix('torch.')}"


def assign(groups: Sequence[FlatGroup], policy: PlacementPolicy) -> dict[str, GroupPlacement]:
    """Return where each group's kinds of state have their homes, by the group's name.

    Trainable and frozen groups are assigned separately, because frozen groups have no optimizer states.
    """
    placed: dict[str, GroupPlacement] = {}
    for trainable in (True, False):
        alike = [group for group in groups if group.trainable == trainable]
        assigned = policy.assign([group.slot_table.partition_numel for group in alike])
        placed |= {group.name: placement for group, placement in zip(alike, assigned, strict=True)}
    return placed


def open_request(
    parameters: Sequence[ModelParameter],
    optimizer: StoreOptimizer,
    policy: PrecisionPolicy,
    *,
    job: str,
    run_id: str,
    rank: int,
    world_size: int,
    attached_ranks: int,
    durability: str,
    resume: pb.ResumePolicy,
    layout: str,
    buffers: Iterable[pb.Parameter] = (),
) -> pb.OpenJobRequest:
    """Return the request that opens a job at a store to which `attached_ranks` ranks of the job attach.

    `buffers` are the declared entries in which the job's commits have the ranks' large buffers.
    """
    return pb.OpenJobRequest(
        job=job,
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        attached_ranks=attached_ranks,
        parameters=[
            pb.Parameter(
                fqn=p.fqn,
                shape=p.shape,
                dtype=WIRE_DTYPES[policy.dtype_of(p)],
                trainable=optimizer.has_states(p),
            )
            for p in parameters
        ]
        + list(buffers),
        durability=parse_durability(durability),
        resume=resume,
        layout=layout,
    )
