"""The model of the training benchmarks, and its data.

This module must never import the project, because DeepSpeed's environment, which lacks its dependencies, imports this
module.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.training.task import HEAD_WIDTH, TrainingTask

MODEL_SEED = 0
DATA_SEED = 1


def build(task: TrainingTask) -> nn.Module:
    """Return the task's model in torch's default dtype, with the same initial values for every contestant.

    This seeds torch's global generator.
    """
    torch.manual_seed(MODEL_SEED)
    config = GPT2Config(
        vocab_size=task.vocab,
        n_positions=task.tokens,
        n_embd=task.hidden,
        n_layer=task.layers,
        n_head=task.hidden // HEAD_WIDTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    if task.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batches(task: TrainingTask) -> Iterator[torch.Tensor]:
    """Yield token ids [batch, tokens] without end, the same for every contestant."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    while True:
        yield torch.randint(0, task.vocab, (task.batch, task.tokens), generator=generator)
