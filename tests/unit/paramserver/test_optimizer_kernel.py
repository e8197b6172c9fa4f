"""The AdamW kernel gives torch.optim's bits on any partition at multiples of 16 elements, in any tiles."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch._dynamo  # by torch at the first optimizer otherwise: seconds

from paramserver.optimizer_kernel import OptimizerUpdate
from paramserver.v1 import parameter_store_pb2 as pb
from storage.shard import Kind, Shard
from storage.transform import Tile

NUMEL = 10_007
STEPS = 5
HYPER = {"lr": 3e-3, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}


def torch_states(scale: float) -> dict[Kind, torch.Tensor]:
    weight = initial().requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=3e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, fused=True)
    for step in range(1, STEPS + 1):
        weight.grad = gradient(step) * scale
        optimizer.step()
    state = optimizer.state[weight]
    return {Kind.PARAM: weight.detach(), Kind.EXP_AVG: state["exp_avg"], Kind.EXP_AVG_SQ: state["exp_avg_sq"]}


def initial() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


def gradient(step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))


def update(states: dict[Kind, torch.Tensor], shard: Shard, step: int, tile_numel: int, scale: float) -> None:
    row = pb.ApplyGradientsRequest.HyperParameters(adamw=pb.AdamW(**HYPER, update_count=step))
    kernel = OptimizerUpdate(
        shards=[shard],
        hyper_parameters=[row],
        grad_scale=scale,
    )
    numel = len(states[Kind.PARAM])
    for start in range(0, numel, tile_numel):
        part = slice(start, min(start + tile_numel, numel))
        count = part.stop - start
        tensors = {kind: tensor[part] for kind, tensor in states.items()}
        own = gradient(step)[shard.offset :][part]
        kernel(Tile(start=start, numel=count, tensors=tensors, gradient=own, scratch=torch.empty(count)))


@pytest.mark.parametrize("cuts", [[], [16], [4096], [16, 48, 9_984, 10_000]])
@pytest.mark.parametrize("tile_numel", [2048, NUMEL])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_every_partition_gives_the_bits_of_the_whole(cuts: list[int], tile_numel: int, scale: float) -> None:
    expected = torch_states(scale)
    edges = [0, *cuts, NUMEL]
    for first, last in pairwise(edges):
        shard = Shard(fqn="w", offset=first, numel=last - first, position=0)
        states = {
            Kind.PARAM: initial()[first:last].clone(),
            Kind.EXP_AVG: torch.zeros(last - first),
            Kind.EXP_AVG_SQ: torch.zeros(last - first),
        }
        for step in range(1, STEPS + 1):
            update(states, shard, step, tile_numel, scale)
        for kind, tensor in states.items():
            assert torch.equal(tensor, expected[kind][first:last]), (kind, first, last)
