"""The AdamW optimizer, which is Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101)."""

from __future__ import annotations

import torch

from paramserver.contract.optimizers.adam import RANGES, STATES, update
from paramserver.contract.optimizers.optimizer import Optimizer, States, Tensors
from paramserver.v1 import parameter_store_pb2 as pb


def _rule(values: pb.AdamW, weights: Tensors, gradients: Tensors, states: States) -> None:
    update(torch._fused_adamw_, values, weights, gradients, states)


RECORD = Optimizer(name="adamw", states=STATES, ranges=RANGES, rule=_rule, is_counted=True)
