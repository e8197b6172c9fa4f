"""What the hyper-parameters of the wire mean: the arithmetic of each optimizer, on one range of one parameter.

The daemon applies it to what it stores, a trainer to what it keeps on its own device: one function, so that both give
the same bits. All rules are elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.optim.adamw import adamw

from paramserver.v1 import parameter_store_pb2 as pb

HyperParameters = pb.ApplyGradientsRequest.HyperParameters
Rule = Callable[[HyperParameters, torch.Tensor, torch.Tensor, Mapping[pb.Kind, torch.Tensor]], None]


def apply(
    row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: Mapping[pb.Kind, torch.Tensor]
) -> None:
    """Updates weight and states in place, on any device.

    Args:
        row: which optimizer, and its hyper-parameters.
        weight: [n] fp32.
        gradient: [n] fp32, unscaled and clipped; may be overwritten.
        states: [n] fp32 each, the optimizer's STATE_KINDS.
    """
    _RULES[row.WhichOneof("optimizer")](row, weight, gradient, states)


def _adamw(
    row: HyperParameters, weight: torch.Tensor, gradient: torch.Tensor, states: Mapping[pb.Kind, torch.Tensor]
) -> None:
    """Loshchilov & Hutter, arXiv:1711.05101, by torch's fused kernel."""
    hyper = row.adamw
    adamw(
        [weight],
        [gradient],
        [states[pb.KIND_EXP_AVG]],
        [states[pb.KIND_EXP_AVG_SQ]],
        [],
        # torch increments the count before it uses it.
        [torch.tensor(float(hyper.update_count - 1), device=weight.device)],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
    )


_RULES: Mapping[str, Rule] = {"adamw": _adamw}

STATE_KINDS: Mapping[str, tuple[pb.Kind, ...]] = {"adamw": (pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ)}
