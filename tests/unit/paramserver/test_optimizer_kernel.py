"""The kernel gives the bits of torch.optim's fused optimizers, and of Lion's published code, in any tiles and on any
partition at multiples of 16 elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo  # by torch at the first optimizer otherwise: seconds
from torch.optim import SGD, Adagrad, Adam, AdamW

from paramserver.optimizer_kernel import OptimizerUpdate
from paramserver.v1 import parameter_store_pb2 as pb
from storage.shard import Kind, Shard
from storage.transform import Tile

NUMEL = 10_007
STEPS = 5
Row = pb.ApplyGradientsRequest.HyperParameters
States = dict[Kind, torch.Tensor]

ADAM: dict[str, Any] = {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.1}
BETAS: dict[str, Any] = {"beta1": 0.8, "beta2": 0.99}
MOMENTUM: dict[str, Any] = {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1}
ADAGRAD: dict[str, Any] = {
    "lr": 3e-2,
    "lr_decay": 0.1,
    "weight_decay": 0.1,
    "eps": 1e-6,
    "initial_accumulator_value": 0.25,
}


class PublishedLion(torch.optim.Optimizer):
    """The update of github.com/lucidrains/lion-pytorch, written down for this test."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            lr, wd, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for p in group["params"]:
                exp_avg = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.data.mul_(1.0 - lr * wd)
                update = exp_avg.clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_()
                p.add_(update, alpha=-lr)
                exp_avg.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An optimizer of torch, and the row that stands for it in the n-th update."""

    reference: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    row: Callable[[int], Row]
    states: Mapping[Kind, str]


MOMENTS = {Kind.EXP_AVG: "exp_avg", Kind.EXP_AVG_SQ: "exp_avg_sq"}
BUFFER = {Kind.MOMENTUM_BUFFER: "momentum_buffer"}
CASES = {
    "adamw": Case(
        reference=lambda p: AdamW(p, betas=(0.8, 0.99), fused=True, **ADAM),
        row=lambda n: Row(adamw=pb.AdamW(**ADAM, **BETAS, update_count=n)),
        states=MOMENTS,
    ),
    "adam": Case(
        reference=lambda p: Adam(p, betas=(0.8, 0.99), fused=True, **ADAM),
        row=lambda n: Row(adam=pb.Adam(**ADAM, **BETAS, update_count=n)),
        states=MOMENTS,
    ),
    "sgd": Case(
        reference=lambda p: SGD(p, lr=3e-2, weight_decay=0.1, fused=True),
        row=lambda n: Row(sgd=pb.Sgd(lr=3e-2, weight_decay=0.1, update_count=n)),
        states={},
    ),
    "momentum": Case(
        reference=lambda p: SGD(p, fused=True, **MOMENTUM),
        row=lambda n: Row(sgd=pb.Sgd(**MOMENTUM, update_count=n)),
        states=BUFFER,
    ),
    "dampened": Case(
        reference=lambda p: SGD(p, dampening=0.3, fused=True, **MOMENTUM),
        row=lambda n: Row(sgd=pb.Sgd(**MOMENTUM, dampening=0.3, update_count=n)),
        states=BUFFER,
    ),
    "nesterov": Case(
        reference=lambda p: SGD(p, nesterov=True, fused=True, **MOMENTUM),
        row=lambda n: Row(sgd=pb.Sgd(**MOMENTUM, nesterov=True, update_count=n)),
        states=BUFFER,
    ),
    "lion": Case(
        reference=lambda p: PublishedLion(p, lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1),
        row=lambda n: Row(lion=pb.Lion(**BETAS, lr=3e-3, weight_decay=0.1)),
        states={Kind.EXP_AVG: "exp_avg"},
    ),
    "adagrad": Case(
        reference=lambda p: Adagrad(p, fused=True, **ADAGRAD),
        row=lambda n: Row(adagrad=pb.Adagrad(**ADAGRAD, update_count=n)),
        states={Kind.SUM: "sum"},
    ),
}


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
        kernel(Tile(start=start, numel=count, tensors=tensors, gradient=own, scratch=torch.empty(count)))


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
        shard = Shard(fqn="w", offset=first, numel=last - first, position=0)
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
    shard = Shard(fqn="w", offset=0, numel=NUMEL, position=0)
    for step, momentum in enumerate(momenta, start=1):
        optimizer.param_groups[0]["momentum"] = momentum
        weight.grad = gradient(step)
        optimizer.step()
        row = Row(sgd=pb.Sgd(lr=0.1, momentum=momentum, update_count=step))
        update(states, shard, OptimizerUpdate(shards=[shard], hyper_parameters=[row], grad_scale=1.0), step, 4096)

    assert torch.equal(states[Kind.PARAM], weight.detach())
    assert torch.equal(states[Kind.MOMENTUM_BUFFER], optimizer.state[weight]["momentum_buffer"])
