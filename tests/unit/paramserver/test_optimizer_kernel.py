"""The kernel gives the bits of torch.optim's fused optimizers, and of Lion's published code, in any tiles and on any
partition at multiples of 16 elements."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch._dynamo  # Otherwise torch would import it at the first optimizer, within a test.
from torch.optim import SGD

from paramserver.optimizer_kernel import OptimizerUpdate
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind, Shard
from storage.steps.tile import UpdateTile
from tests.optimizer_cases import CASES, Case, Row

NUMEL = 10_007
STEPS = 5
States = dict[Kind, torch.Tensor]


def initial() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


def gradient(step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))


def reference_states(case: Case, scale: float, clip_value: float | None) -> States:
    weight = initial().requires_grad_()
    optimizer = case.reference([weight])
    for step in range(1, STEPS + 1):
        weight.grad = gradient(step) * scale
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_([weight], clip_value)
        optimizer.step()
    state = optimizer.state[weight]
    return {Kind.PARAM: weight.detach()} | {kind: state[name] for kind, name in case.states.items()}


def update(states: States, shard: Shard, kernel: OptimizerUpdate, step: int, tile_numel: int) -> None:
    numel = len(states[Kind.PARAM])
    for start in range(0, numel, tile_numel):
        part = slice(start, min(start + tile_numel, numel))
        count = part.stop - start
        tensors = {kind: tensor[part] for kind, tensor in states.items()}
        own = gradient(step)[shard.offset :][part]
        kernel(UpdateTile(start=start, numel=count, tensors=tensors, gradient=own, scratch=torch.empty(count)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [[], [16], [4096], [16, 48, 9_984, 10_000]])
@pytest.mark.parametrize("tile_numel", [2048, NUMEL])
@pytest.mark.parametrize(("scale", "clip_value"), [(1.0, None), (0.37, None), (0.37, 0.2)])
def test_every_partition_gives_the_bits_of_the_whole(
    name: str, cuts: list[int], tile_numel: int, scale: float, clip_value: float | None
) -> None:
    case = CASES[name]
    expected = reference_states(case, scale, clip_value)
    for first, last in pairwise([0, *cuts, NUMEL]):
        shard = Shard(fqn="w", offset=first, numel=last - first, group_offset=0)
        states = {Kind.PARAM: initial()[first:last].clone()} | {kind: torch.zeros(last - first) for kind in case.states}
        for step in range(1, STEPS + 1):
            row = case.row(step)
            kernel = OptimizerUpdate(shards=[shard], hyper_parameters=[row], grad_scale=scale, clip_value=clip_value)
            update(states, shard, kernel, step, tile_numel)
        for kind, tensor in states.items():
            assert torch.equal(tensor, expected[kind][first:last]), (kind, first, last)


def test_a_momentum_that_comes_and_goes_gives_torchs_bits() -> None:
    momenta = [0.0, 0.9, 0.0, 0.5]
    weight = initial().requires_grad_()
    optimizer = SGD([weight], lr=0.1, momentum=0.0, fused=True)
    states = {Kind.PARAM: initial(), Kind.MOMENTUM_BUFFER: torch.zeros(NUMEL)}
    shard = Shard(fqn="w", offset=0, numel=NUMEL, group_offset=0)
    for step, momentum in enumerate(momenta, start=1):
        optimizer.param_groups[0]["momentum"] = momentum
        weight.grad = gradient(step)
        optimizer.step()
        row = Row(sgd=pb.Sgd(lr=0.1, momentum=momentum, update_count=step))
        update(states, shard, OptimizerUpdate(shards=[shard], hyper_parameters=[row], grad_scale=1.0), step, 4096)

    assert torch.equal(states[Kind.PARAM], weight.detach())
    assert torch.equal(states[Kind.MOMENTUM_BUFFER], optimizer.state[weight]["momentum_buffer"])
