"""DeepSpeed's arguments of `zero.Init` and `zero.GatheredParameters`, before there is an engine."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer_client import zero
from trainer_client.errors import ConfigError
from trainer_client.training.initial.deferred_init import recipe_of, replay

CONFIG = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}


def test_arguments_without_effect_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="trainer_client.zero")
    zero._log_without_effect.cache_clear()
    for _ in range(2):
        with zero.Init(remote_device="nvme", pin_memory=True, mem_efficient_linear=False, dtype=torch.bfloat16):
            assert nn.Linear(1, 1).weight.dtype == torch.bfloat16

    assert torch.get_default_dtype() == torch.float32
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("=")[0] for line in lines] == ["zero.Init(remote_device", "zero.Init(pin_memory"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_quantized_weights": True}, "zero_quantized_weights=...) is not honoured: it rounds"),
        ({"zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
        ({"param_swapper": object()}, "offload_param"),
        ({"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 2)}, "get_model_parallel_world_size() is 2"),
        ({"dtype": torch.int8}, "floating-point"),
        ({"seed": -1}, "seed=-1"),
        ({"config": CONFIG, "config_dict_or_path": {}}, "two names of one argument"),
        ({"config": {"train_batch_size": 1, "zero_optimization": {"stage": 7}}}, "stage"),
    ],
)
def test_arguments_that_would_change_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        zero.Init(**arguments)
    assert message in str(error.value)


def test_a_model_with_values_and_a_disabled_context_stay_as_they_are() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.clone()

    zero.Init(module=model, config_dict_or_path=CONFIG, config=CONFIG)
    with zero.Init(enabled=False):
        assert not nn.Linear(1, 1).weight.is_meta

    assert torch.equal(model.weight, before)


def test_contexts_may_be_nested_and_the_outer_one_has_the_seed() -> None:
    def build(seed: int, *, nested: bool) -> nn.Module:
        with zero.Init(seed=seed), zero.Init(enabled=nested):
            first = nn.Linear(3, 3)
        assert recipe_of(first.weight)
        return first

    assert torch.equal(replay(build(2, nested=True).weight), replay(build(2, nested=False).weight))  # type: ignore[arg-type]
    with zero.Init(seed=1):
        with zero.Init(dtype=torch.bfloat16):
            assert nn.Linear(1, 1).weight.dtype == torch.bfloat16
        after = nn.Linear(1, 1)
        with pytest.raises(ConfigError, match="pass the seed to the outer one"), zero.Init(seed=3):
            pass
    assert after.weight.dtype == torch.float32
    assert recipe_of(after.weight)


@pytest.mark.parametrize(
    ("sections", "argument", "expected"),
    [
        ({}, None, torch.float32),
        ({"bf16": {"enabled": True}}, None, torch.bfloat16),
        ({"fp16": {"enabled": True}}, None, torch.float16),
        ({"bf16": {"enabled": True}}, torch.float32, torch.float32),
    ],
)
def test_parameters_get_the_dtype_of_the_config_and_buffers_keep_theirs(
    sections: dict[str, Any], argument: torch.dtype | None, expected: torch.dtype
) -> None:
    with zero.Init(config_dict_or_path=CONFIG | sections, dtype=argument, seed=3):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        frequencies = torch.arange(8, dtype=torch.int64) / 8
        first.register_buffer("frequencies", frequencies)
        scale = nn.Parameter(torch.full((2,), 0.1, dtype=torch.float32))
        first.register_parameter("scale", scale)
    values, buffer = replay(scale), replay(frequencies)

    assert {parameter.dtype for parameter in first.parameters()} == {expected}
    assert second.weight is first.weight
    assert values is not None and torch.equal(values, torch.full((2,), 0.1).to(expected))
    assert buffer is not None and torch.equal(buffer, torch.arange(8) / 8)


def test_parameters_are_read_before_there_is_an_engine() -> None:
    with zero.Init(seed=5):
        model = nn.Linear(4, 4)
    expected = replay(model.weight)

    with zero.GatheredParameters(model.weight):
        assert torch.equal(model.weight, expected)
        assert model.bias.is_meta
    assert model.weight.is_meta
    assert torch.equal(replay(model.weight), expected)


def test_parameters_are_changed_before_there_is_an_engine() -> None:
    with zero.Init(seed=5):
        model = nn.Linear(4, 4)
    weight = model.weight
    weight.is_mine = True  # type: ignore[attr-defined]
    loaded = {"weight": torch.full((4, 4), 7.0), "bias": torch.zeros(4)}

    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.load_state_dict(loaded)

    assert model.weight is weight
    assert weight.is_mine  # type: ignore[attr-defined]
    assert torch.equal(model.weight, loaded["weight"])


def test_an_error_within_the_context_undoes_the_change() -> None:
    with zero.Init(seed=5):
        model = nn.Linear(4, 4)
    expected = replay(model.weight)

    with pytest.raises(ZeroDivisionError), zero.GatheredParameters(model, modifier_rank=0), torch.no_grad():
        model.weight.zero_()
        raise ZeroDivisionError

    assert torch.equal(replay(model.weight), expected)


def test_parameters_are_changed_within_init() -> None:
    with zero.Init(seed=5):
        model = nn.Linear(4, 4)
        with zero.GatheredParameters(model.weight, modifier_rank=0):
            nn.init.ones_(model.weight)
            # This is recorded by no recorder, because another rank may not do it.
            assert not recipe_of(torch.zeros(3))
        after = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.add_(1)

    assert torch.equal(model.weight, torch.full((4, 4), 2.0))
    assert recipe_of(after.weight)


def test_parameters_are_named_in_any_form_and_what_is_none_is_left_out() -> None:
    with zero.Init(seed=5):
        layer = nn.Linear(4, 2, bias=False)
    plain = nn.Linear(2, 2).weight
    forms = [
        [layer.weight, layer.bias],
        (layer.weight, layer.weight, None, plain),
        (parameter for parameter in (None, layer.weight)),
        layer.weight,
        layer,
        dict(layer.named_parameters()).values(),
    ]

    for form in forms:
        with zero.GatheredParameters(form, modifier_rank=None):  # type: ignore[arg-type]
            assert not layer.weight.is_meta
        assert layer.weight.is_meta
    for nothing in ([], None, [None], [plain], plain):
        with zero.GatheredParameters(nothing, modifier_rank=0):
            assert layer.weight.is_meta


def test_what_is_no_parameter_is_refused_by_its_type() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))

    with pytest.raises(ConfigError, match=r"GatheredParameters\(\): a Linear is neither a parameter nor None: pass"):
        zero.GatheredParameters([model[0]])
    with pytest.raises(ConfigError, match="a str is neither"):
        zero.GatheredParameters("weight")  # type: ignore[arg-type]
    with zero.GatheredParameters(["weight"], enabled=False):  # type: ignore[list-item]
        pass


def test_scripts_see_whether_a_parameter_has_values() -> None:
    seen = []
    with zero.Init():
        weight: Any = nn.Linear(4, 2).weight
        seen.append(weight.ds_status.name)
    with zero.GatheredParameters(weight):
        seen.append(weight.ds_status.name)
    seen.append(weight.ds_status.name)
    with zero.GatheredParameters(weight, modifier_rank=0):
        pass
    seen.append(weight.ds_status.name)

    assert seen == ["NOT_AVAILABLE", "AVAILABLE", "NOT_AVAILABLE", "AVAILABLE"]
    assert (weight.ds_shape, weight.ds_numel, weight.ds_persist) == ((2, 4), 8, False)
    assert (weight.ds_tensor.shape, weight.ds_tensor.dtype) == ((8,), weight.dtype)
    assert not hasattr(nn.Linear(4, 2).weight, "ds_id")


def test_a_change_that_no_rank_keeps_is_a_warning_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    for checks in (False, True):
        section = {"stage": 3, "enable_sanity_checks": checks}
        with zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": section}):
            layer = nn.Linear(4, 2)
        with zero.GatheredParameters(layer.weight, modifier_rank=None):
            before = layer.weight.detach().clone()
        context = zero.GatheredParameters(layer.parameters(), modifier_rank=None)
        lost = pytest.raises(RuntimeError, match="in-place modification") if checks else nullcontext()
        with lost, context, torch.no_grad():
            layer.weight.add_(1.0)
        with zero.GatheredParameters(layer.weight):
            assert torch.equal(layer.weight, before)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert r"in-place modification of parameters of shape [2, 4] within" in caplog.text


def test_external_parameters_are_kept_until_there_is_an_engine() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first, second)
    weight = model.get_parameter("0.weight")

    zero.register_external_parameter(second, weight)
    zero.register_external_parameter(second, weight)
    with zero.GatheredParameters(first.bias, fwd_module=second):
        pass
    assert [(m is second, p is weight) for m, p in zero.external_parameters(model)] == [
        (True, True),
        (True, False),
    ]

    zero.unregister_external_parameter(second, weight)
    assert [p is first.bias for _, p in zero.external_parameters(model)] == [True]
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(ConfigError, match="was not registered for this Linear"):
        zero.unregister_external_parameter(second, weight)
    with pytest.raises(ConfigError, match=r"no torch\.nn\.Parameter"):
        zero.register_external_parameter(second, torch.zeros(1))  # type: ignore[arg-type]


class Placed(nn.Module):
    """A layer with buffers that its constructor computes, changes and shares, as rotary embeddings and masks are."""

    shared: torch.Tensor
    mask: torch.Tensor

    def __init__(self, other: Placed | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("angles", 10000 ** -(torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
        self.register_buffer("mask", torch.empty(3, 3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("shared", torch.ones(2) if other is None else other.shared)
        self.mask.fill_(1).tril_()


def test_buffers_have_their_values_after_the_context() -> None:
    """Scripts move a model that from_pretrained has given values, and read its tables, before they prepare it."""

    def build() -> nn.Module:
        first = Placed()
        return nn.Sequential(first, Placed(first))

    with zero.Init(seed=1):
        model = build()
    expected = dict(build().named_buffers())
    assert recipe_of(model[0].linear.weight) is not None
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) and not found[name].is_meta for name, value in expected.items())
    assert model[1].shared is model[0].shared


def test_a_constructor_that_fails_within_the_context_gives_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError), zero.Init(seed=1):
        Placed()
        1 / 0  # noqa: B018


@pytest.mark.parametrize("draws", [False, True])
def test_a_model_without_random_values_draws_nothing_from_the_generator(draws: bool) -> None:
    """A loader that shuffles after from_pretrained has the order that it has without the context."""
    before = torch.manual_seed(3).get_state()
    with zero.Init():
        layer = nn.Linear(2, 2) if draws else nn.Parameter(torch.empty(2, 2))
    assert torch.equal(torch.get_rng_state(), before) != draws
    assert recipe_of(layer.weight if isinstance(layer, nn.Linear) else layer) is not None
    with zero.Init():
        torch.randperm(4, device="cpu").tolist()
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_model_without_values_is_moved_to_a_device_and_keeps_its_recipes() -> None:
    def build() -> nn.Module:
        with zero.Init(seed=5):
            return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    model, other = build(), build()
    parameters = list(model.parameters())
    assert model.to("cpu") is model.to(torch.device("cpu"), torch.float32) is model.float() is model
    assert parameters[0].cuda() is parameters[0]

    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    with zero.GatheredParameters([*model.parameters(), *other.parameters()], modifier_rank=0):
        for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, expected)
    # From now on there are values, so a move is torch's.
    assert model[0].weight.to(torch.bfloat16).dtype == torch.bfloat16
    assert not vars(model[0].weight).keys() & {"to", "cuda"}


def test_a_model_without_values_gets_another_dtype_as_torch_gives_it() -> None:
    with zero.Init(seed=5):
        model = nn.Linear(3, 3)
    assert model.to("cpu", torch.bfloat16).weight.dtype == torch.bfloat16
