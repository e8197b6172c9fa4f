"""Configs and engines for runs of the zoo's models. All runs use one daemon, and each is a job of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

import trainer_client
from tests.integration.support.training import MICRO_BATCH, Run
from tests.integration.support.zoo import ZOO

LEARNING_RATE = 1e-2


def run_of(model: str, address: str, job: str, steps: int = 3, **section: Any) -> Run:
    config = config_of(address, job, **section)
    return Run(model=model, steps=steps, clipping=0.5, accumulation=2, config=config)


def config_of(address: str, job: str, device: str = "cpu", **section: Any) -> dict[str, Any]:
    offload = {"device": device}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "paramserver": {"address": address, "job": job, "durability": "step", **section},
    }


def start(model: nn.Module, config: dict[str, Any], **arguments: Any) -> trainer_client.Engine:
    return trainer_client.initialize(model=model, optimizer=optimizer_of(model), config=config, **arguments)[0]


def build(name: str) -> nn.Module:
    """Return a model of the zoo, which has the same values in each call, in the training mode."""
    torch.manual_seed(1)
    return ZOO[name]().train()


def train(engine: trainer_client.Engine, batches: Iterable[torch.Tensor]) -> None:
    """Make a step of a language model with each batch of tokens, [samples, tokens]."""
    for batch in batches:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)
