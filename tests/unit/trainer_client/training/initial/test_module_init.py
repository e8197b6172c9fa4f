"""A model on the meta device is initialised by its own functions, module by module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trainer_client import ConfigError
from trainer_client.training.initial.initial_values import InitialValues
from trainer_client.training.initial.module_init import ModuleInit
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.ranks.collectives import Collectives

COMMON: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def fill_buffers(model: nn.Module) -> None:
    """Give the model its parameters and buffers as `initialize` does; none of them stays on the meta device."""
    InitialValues(model, list_parameters(model), Collectives(torch.device("cpu")))


def build(kind: str) -> PreTrainedModel:
    if kind == "bert":
        return BertForMaskedLM(BertConfig(vocab_size=300, pad_token_id=0, **COMMON))
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, **COMMON))


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_transformers_models_get_their_own_distributions_and_buffers(kind: str) -> None:
    torch.manual_seed(0)
    plain = build(kind)
    with torch.device("meta"):
        model = build(kind)
    fill_buffers(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name
    init = ModuleInit(model, None, 0)
    for name, expected in plain.named_parameters():
        owner, _, local = name.rpartition(".")
        values = init.tensors_of(owner)[local]
        assert torch.equal(values, init.tensors_of(owner)[local])
        assert values.mean().item() == pytest.approx(expected.mean().item(), abs=4e-3), name
        assert values.std().item() == pytest.approx(expected.std().item(), rel=0.2), name


class Scale(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), value))
        self.register_buffer("offset", torch.zeros(3))


def test_param_init_fn_comes_first_and_a_module_without_functions_is_named() -> None:
    def initialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)  # FSDP requires this call; here it is harmless.
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 3.0)

    def build_model() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(2, 2), Scale(2.0))

    model = build_model()
    parameters = list(model.parameters())
    InitialValues(model, list_parameters(model), Collectives(torch.device("cpu")), param_init_fn=initialise)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.get_buffer("1.offset").tolist() == [3.0] * 3
    values = ModuleInit(model, initialise, 0).tensors_of("0")
    assert values["weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert model.get_parameter("0.weight").isnan().all()

    with pytest.raises(ConfigError, match=r"scale, offset of module 1 \(Scale\).*param_init_fn"):
        fill_buffers(build_model())


class Masked(nn.Module):
    """A module with buffers of dtypes that have no NaN."""

    def __init__(self, *, sets: bool) -> None:
        super().__init__()
        self.sets = sets
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))
        self.register_buffer("levels", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("given", torch.tensor([torch.nan, 0.0], device="cpu"))

    def reset_parameters(self) -> None:
        if self.sets:
            self.get_buffer("mask").copy_(torch.tril(torch.ones(3, 3, dtype=torch.bool)))
            self.get_buffer("levels").zero_()


def test_booleans_and_integers_that_no_function_sets_are_named_and_any_value_may_be_set() -> None:
    with torch.device("meta"):
        unset, model = Masked(sets=False), Masked(sets=True)

    with pytest.raises(ConfigError, match=r"mask, levels of module .*\(Masked\).*no function"):
        fill_buffers(unset)
    fill_buffers(model)
    assert torch.equal(model.get_buffer("mask"), torch.tril(torch.ones(3, 3, dtype=torch.bool)))
    assert torch.equal(model.get_buffer("levels"), torch.zeros(3, dtype=torch.uint8))
    assert model.get_buffer("given").isnan().tolist() == [True, False]


def test_values_are_drawn_in_the_dtype_of_the_model_also_when_its_parameters_have_got_another_one() -> None:
    """A parameter has the dtype of the forward when it is in the store, and a lost store asks for its values again."""
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    values = InitialValues(model, list_parameters(model), Collectives(torch.device("cpu")))
    first = values.whole(list_parameters(model)[0])

    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.shape, dtype=torch.bfloat16)

    assert torch.equal(values.whole(list_parameters(model)[0]), first)
    assert not torch.equal(first, first.bfloat16().float())
