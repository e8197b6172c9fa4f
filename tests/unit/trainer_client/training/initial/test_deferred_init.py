"""The initialisation that zero.Init records gives the values of a plain construction, except for the random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from trainer_client import DeferredInitError, zero
from trainer_client.training.initial.deferred_init import RecipeRecorder, recipe_of, replay

WIDTH = 64
COMMON: Any = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2() -> nn.Module:
    ends: Any = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=257, n_positions=64, **ends))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, **COMMON))


def t5() -> nn.Module:
    config = T5Config(d_model=WIDTH, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=300)
    return T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(vocab_size=300, **COMMON))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **COMMON))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(vocab_size=300, num_key_value_heads=2, num_local_experts=4, **COMMON))


def swin() -> nn.Module:
    return SwinForImageClassification(
        SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
    )


def layers() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH), nn.TransformerEncoder(encoder, 2))
    model.append(nn.BatchNorm1d(3))
    model.append(nn.Embedding(WIDTH, WIDTH, padding_idx=3))
    return model


@pytest.mark.parametrize("build", [gpt2, llama, t5, bert, vit, mixtral, swin, layers])
def test_distributions_and_buffers_are_those_of_a_plain_construction(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = build()
    with zero.Init():
        model = build()

    tensors = model.state_dict(keep_vars=True)
    assert tensors.keys() == plain.state_dict().keys()
    for (name, expected), (same_name, parameter) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert same_name == name  # Tied parameters stay tied, so there are as many names.
        assert parameter.is_meta
        assert parameter.requires_grad == expected.requires_grad
        values = replay(parameter)
        assert values.shape == expected.shape
        assert values.dtype == expected.dtype
        assert torch.equal(values, replay(parameter))
        if bool((expected == expected.flatten()[0]).all()):
            assert torch.equal(values, expected), name
            continue
        deviation = expected.std()
        error = 6 / math.sqrt(values.numel())  # This is six standard errors of the mean, and more of the deviation.
        assert abs(values.std() / deviation - 1) < error, name
        assert abs(values.mean() - expected.mean()) < 2 * error * deviation, name
        assert torch.equal(values == 0, expected == 0), name  # Padding rows, for example, are zero in both.
    for (name, wanted), (_, buffer) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        values = replay(buffer) if recipe_of(buffer) else buffer
        assert torch.equal(values, wanted), name
        assert values.dtype == wanted.dtype


class Odd(nn.Module):
    """A module that initialises its tensors in all the ways that are found in models."""

    def __init__(self) -> None:
        super().__init__()
        self.by_views = nn.Parameter(torch.empty(6, 4))
        with torch.no_grad():
            for part in self.by_views.chunk(3):
                nn.init.orthogonal_(part)
            self.by_views[5].zero_()
            self.by_views.t()[0].mul_(2)
        self.by_mask = nn.Parameter(torch.ones(8))
        self.by_mask.data[torch.arange(8) > 4] = 7.0
        self.by_mask.data[torch.tensor([1, 2])] = 5.0
        self.copied = nn.Parameter(self.by_views.detach().clone())
        self.part_of_another = nn.Parameter(self.by_views.data[1:3])
        self.never_written = nn.Parameter(torch.empty(5))
        self.truncated = nn.Parameter(torch.empty(1000))
        nn.init.trunc_normal_(self.truncated, std=1.0, a=-1.0, b=1.0)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 10), 0.3))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(3, 3, 3)))
        self.constant = nn.Parameter(torch.tensor(2.5))
        frequencies = 1.0 / (100 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("angles", torch.outer(torch.arange(5), frequencies).sin(), persistent=False)
        self.register_buffer("large", (torch.arange(8) > 4).nonzero())
        self.rates = torch.linspace(0, 1, 3).tolist()
        self.first_rate = torch.linspace(0.5, 1, 3)[0].item()
        if self.truncated.device.type == "meta" or bool(self.truncated.abs().max() > 1.0):
            raise AssertionError


def test_every_way_to_initialise_is_replayed() -> None:
    with zero.Init(seed=1):
        model = Odd()
    values = {name: replay(p) if recipe_of(p) else p for name, p in model.named_parameters()}

    by_views = values["by_views"].clone()
    assert torch.equal(values["copied"], by_views)
    assert torch.equal(values["part_of_another"], by_views[1:3])
    assert torch.equal(by_views[5], torch.zeros(4))
    by_views[:, 0] /= 2
    for first in (0, 2):  # Each part has orthonormal rows.
        part = by_views[first : first + 2]
        torch.testing.assert_close(part @ part.T, torch.eye(2))
    assert values["by_mask"].tolist() == [1, 5, 5, 1, 1, 7, 7, 7]
    assert torch.equal(values["never_written"], torch.zeros(5))
    assert values["truncated"].abs().max() <= 1.0
    assert 0.45 < values["truncated"].std() < 0.62
    assert (values["sparse"] == 0).sum(dim=0).tolist() == [3] * 10
    assert torch.equal(values["dirac"], nn.init.dirac_(torch.empty(3, 3, 3)))
    assert values["constant"] == 2.5
    plain = Odd()
    for name, buffer in plain.named_buffers():
        mine = model.get_buffer(name)
        assert torch.equal(replay(mine) if recipe_of(mine) else mine, buffer), name
    assert (model.rates, model.first_rate) == (plain.rates, plain.first_rate)


def test_values_follow_from_the_seed_and_nothing_else() -> None:
    def values(seed: int | None, order: int = 1) -> list[torch.Tensor]:
        with zero.Init(seed=seed):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        torch.randn(3)
        return [replay(p) for p in list(model.parameters())[::order]][::order]

    first, again, other = values(4), values(4, order=-1), values(5)
    torch.manual_seed(1)
    drawn = values(None)
    torch.manual_seed(1)
    assert all(map(torch.equal, values(None), drawn))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    assert not any(map(torch.equal, drawn, values(None)))  # Two models of one program differ.


def test_replay_and_construction_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    with zero.Init(seed=0):
        model = nn.Linear(5, 7)
    replay(model.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_put_off_is_refused() -> None:
    outside = torch.ones(3)
    with zero.Init(seed=0):
        kept = torch.empty(3).copy_(outside)
        with pytest.raises(DeferredInitError, match=r"aten\.nonzero\.out writes to elements that values"):
            torch.nonzero(torch.randn(6) > 0, out=torch.empty(0, dtype=torch.int64))
    outside.add_(1)
    with pytest.raises(DeferredInitError, match="was changed later"):
        replay(kept)


def test_values_are_made_while_the_recorder_is_suspended() -> None:
    with zero.Init(seed=0):
        before = nn.Linear(2, 2)
        with RecipeRecorder.suspended():
            between = nn.Linear(2, 2)
            assert before.weight.is_meta
        after = nn.Linear(2, 2)

    assert not between.weight.is_meta
    assert recipe_of(before.weight)
    assert recipe_of(after.weight)
