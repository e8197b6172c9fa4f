"""The models of the training benchmarks, and their data.

This module must never import the project, because DeepSpeed's environment, which lacks its dependencies, imports this
module.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

from benchmarks.training.task import HEAD_WIDTH, TrainingTask

MODEL_SEED = 0
DATA_SEED = 1
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
DROPPED_LAYERS = 0.25
INITIAL_DEVIATION = 0.02


def build(task: TrainingTask) -> nn.Module:
    """Return the task's model in torch's default dtype, with the same initial values for every contestant.

    This seeds torch's global generator.
    """
    torch.manual_seed(MODEL_SEED)
    match task.model:
        case "gpt2":
            model = GPT2LMHeadModel(_gpt2_config(task))
            if task.checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            return model
        case "opt_layer_drop":
            return OPTForCausalLM(_opt_config(task))
        case "mixtral":
            return MixtralForCausalLM(_mixtral_config(task))
        case "mixtral_experts":
            return _with_single_experts(MixtralForCausalLM(_mixtral_config(task)))


def batches(task: TrainingTask) -> Iterator[torch.Tensor]:
    """Yield token ids [batch, tokens] without end, the same for every contestant."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    while True:
        yield torch.randint(0, task.vocab, (task.batch, task.tokens), generator=generator)


class Expert(nn.Module):
    """One expert of Mixtral: a gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=INITIAL_DEVIATION)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the expert's output for `hidden`; both are [tokens, hidden]."""
        values: torch.Tensor = self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return values


class SingleExperts(nn.Module):
    """A replacement of transformers' `MixtralExperts`, which holds all experts in one tensor; here each is a module."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(hidden, inner) for _ in range(EXPERTS)])

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's chosen experts.

        Args:
            hidden: [tokens, hidden], as is the result.
            chosen: the indices of the experts, [tokens, EXPERTS_PER_TOKEN].
            weights: the weights of the experts, of the same shape.
        """
        result = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if len(token):
                values = expert(hidden[token]) * weights[token, place, None]
                result = result.index_add(0, token, values.to(result.dtype))
        return result


def _with_single_experts(model: MixtralForCausalLM) -> MixtralForCausalLM:
    config = model.config
    for layer in model.model.layers:
        layer.mlp.experts = SingleExperts(config.hidden_size, config.intermediate_size)
    return model


def _gpt2_config(task: TrainingTask) -> GPT2Config:
    return GPT2Config(
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


def _opt_config(task: TrainingTask) -> OPTConfig:
    return OPTConfig(
        vocab_size=task.vocab,
        max_position_embeddings=task.tokens,
        hidden_size=task.hidden,
        word_embed_proj_dim=task.hidden,
        ffn_dim=4 * task.hidden,
        num_hidden_layers=task.layers,
        num_attention_heads=task.hidden // HEAD_WIDTH,
        dropout=0.0,
        layerdrop=DROPPED_LAYERS,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _mixtral_config(task: TrainingTask) -> MixtralConfig:
    return MixtralConfig(
        vocab_size=task.vocab,
        max_position_embeddings=task.tokens,
        hidden_size=task.hidden,
        intermediate_size=2 * task.hidden,
        num_hidden_layers=task.layers,
        num_attention_heads=task.hidden // HEAD_WIDTH,
        num_key_value_heads=task.hidden // HEAD_WIDTH,
        num_local_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
