"""The optimizers that the store runs: for each, the reference in torch and the optimizer's description on the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import Kind

Row = pb.ApplyGradientsRequest.HyperParameters

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
    """The update rule of github.com/lucidrains/lion-pytorch, written again as a reference."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
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
    """An optimizer of torch, and the message that describes the same optimizer to the store in the n-th update."""

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
        reference=lambda p: Adagrad(p, fused=None if p[0].is_cuda else True, **ADAGRAD),
        row=lambda n: Row(adagrad=pb.Adagrad(**ADAGRAD, update_count=n)),
        states={Kind.SUM: "sum"},
    ),
}
