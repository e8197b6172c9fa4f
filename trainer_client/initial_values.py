"""The values that a new job begins with. Must never hold more than one flat group of them at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.collectives import Collectives
from trainer_client.flat_group import FlatGroup
from trainer_client.states import GroupStates


def stage_initial_values(states: Iterable[GroupStates], collectives: Collectives) -> None:
    """Stages this rank's chunks of rank 0's weights as step 0. A collective."""
    for state in states:
        group = state.group
        chunk = initial_chunk(group, collectives)
        kinds = (pb.KIND_PARAM, pb.KIND_MASTER) if group.has_master else (pb.KIND_PARAM,)
        state.stage(dict.fromkeys(kinds, chunk), step=0)


@torch.no_grad()
def initial_chunk(group: FlatGroup, collectives: Collectives) -> torch.Tensor:
    """This rank's chunk of rank 0's weights: fp32, on the CPU, padding zero. A collective."""
    flat = torch.zeros(group.layout.numel, dtype=torch.float32, device=collectives.device)
    for piece, parameter in zip(group.pieces(flat), group.parameters, strict=True):
        piece.copy_(parameter.tensor)
    collectives.broadcast(flat)
    return flat[group.start : group.stop].cpu()
