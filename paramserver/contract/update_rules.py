"""What the hyper-parameters of the wire mean: the arithmetic of each optimizer, on one range of one parameter.

The daemon applies it to what it stores, a trainer to what it keeps on its own device: one function, so that both give
the same bits. All rules are elementwise: on the CPU, ranges that are cut at multiples of 16 elements get the
bits of the whole.

torch's fused kernels are called as such, not by the functions of torch.optim, whose bookkeeping takes longer than the
kernel needs for ten thousand elements, and more than that where the processor's cache is full of states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from paramserver.v1 import parameter_store_pb2 as pb

HyperParameters = pb.ApplyGradientsRequest.HyperParameters
States = Mapping[pb.Kind, torch.Tensor]
Rule = Callable[[HyperParameters, torch.Tensor, torch.Tensor, States], None]


def apply(row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    """Updates weight and states in place, on any device.

    Args:
        row: which optimizer, and its hyper-parameters.
        weight: [n] fp32.
        gradient: [n] fp32, unscaled and clipped; may be overwritten.
        states: [n] fp32 each, at least `state_kinds(row)`.
    """
    _RULES[row.WhichOneof("optimizer")](row, weight, gradient, states)


def state_kinds(row: HyperParameters) -> tuple[pb.Kind, ...]:
    """The states that `apply` reads and writes for such a row."""
    optimizer = row.WhichOneof("optimizer")
    if optimizer == "sgd" and row.sgd.momentum == 0:
        return ()
    return _STATE_KINDS[optimizer]


def lion(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Chen et al., arXiv:2302.06675, algorithm 2; weight and first moment are updated in place."""
    weight.mul_(1.0 - lr * weight_decay)
    direction = exp_avg.mul(beta1).add_(gradient, alpha=1.0 - beta1).sign_()
    weight.add_(direction, alpha=-lr)
    exp_avg.mul_(beta2).add_(gradient, alpha=1.0 - beta2)


def _adamw(row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    """Loshchilov & Hutter, arXiv:1711.05101, by torch's fused kernel."""
    _any_adam(row.adamw, weight, gradient, states, decoupled_weight_decay=True)


def _adam(row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    """Kingma & Ba, arXiv:1412.6980, by torch's fused kernel."""
    _any_adam(row.adam, weight, gradient, states, decoupled_weight_decay=False)


def _any_adam(
    hyper: pb.AdamW | pb.Adam,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: States,
    *,
    decoupled_weight_decay: bool,
) -> None:
    kernel = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    kernel(
        [weight],
        [gradient],
        [states[pb.KIND_EXP_AVG]],
        [states[pb.KIND_EXP_AVG_SQ]],
        [],
        [_count(hyper.update_count, weight.device)],
        amsgrad=False,
        maximize=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
    )


def _sgd(row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    """torch.optim.SGD's fused kernel; its docstring says how it differs from Sutskever et al."""
    hyper = row.sgd
    torch._fused_sgd_(
        [weight],
        [gradient],
        [states[pb.KIND_MOMENTUM_BUFFER]] if hyper.momentum != 0 else [],
        weight_decay=hyper.weight_decay,
        momentum=hyper.momentum,
        lr=hyper.lr,
        dampening=hyper.dampening,
        nesterov=hyper.nesterov,
        maximize=False,
        # The buffer becomes the gradient then.
        is_first_step=hyper.momentum != 0 and hyper.update_count == 1,
    )


def _lion(row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    hyper = row.lion
    lion(
        weight,
        gradient,
        states[pb.KIND_EXP_AVG],
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
    )


def _adagrad(row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: States) -> None:
    """Duchi et al., JMLR 12 (2011), by torch's fused kernel."""
    hyper = row.adagrad
    squares = states[pb.KIND_SUM]
    if hyper.update_count == 1:
        squares.fill_(hyper.initial_accumulator_value)
    torch._fused_adagrad_(
        [weight],
        [gradient],
        [squares],
        [_count(hyper.update_count, weight.device)],
        lr=hyper.lr,
        lr_decay=hyper.lr_decay,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=False,
    )


@functools.lru_cache(maxsize=8)
def _count(update_count: int, device: torch.device) -> torch.Tensor:
    """The number of the update, as kernels take it; they only read it."""
    return torch.tensor(float(update_count), device=device)


_RULES: Mapping[str, Rule] = {"adamw": _adamw, "adam": _adam, "sgd": _sgd, "lion": _lion, "adagrad": _adagrad}

_STATE_KINDS: Mapping[str, tuple[pb.Kind, ...]] = {
    "adamw": (pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ),
    "adam": (pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ),
    "sgd": (pb.KIND_MOMENTUM_BUFFER,),
    "lion": (pb.KIND_EXP_AVG,),
    "adagrad": (pb.KIND_SUM,),
}
