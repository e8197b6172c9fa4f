"""Changes that a script makes to parameters in place count as in plain PyTorch, or are an error, and are never lost.

torch's version counters do not see all of them, so each kind is here: by a function of torch, by `.data`, by an array
of numpy that shares the memory, by other memory that is assigned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, AdamW

import trainer_client
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import run_ranks
from trainer_client import Engine, zero
from trainer_client.errors import ConfigError, InPlaceChangeError

STEPS = 4
# The stages at which a rank always has the parameters, with the home of the optimizer's states.
HOMES = [(0, "none"), (1, "cpu"), (2, "none"), (2, "nvme")]
Change = Callable[[nn.Module], None]


class Model(nn.Module):
    """A model of units with a frozen copy of a layer, an embedding that renormalizes its rows, and a first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, max_norm=1.0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.average = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.zeros(8))
        self.register_buffer("is_initialized", torch.tensor(False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        if not self.is_initialized:
            self.scale.data.copy_(1 / hidden.detach().std((0, 1)))
            self.is_initialized.fill_(True)
        hidden = hidden * self.scale
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return (hidden - self.average(hidden)).square().mean()


class Plain(nn.Module):
    """A model of units whose forward changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))
        self.inside: Callable[[nn.Module], None] = lambda _: None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            inputs = torch.tanh(block(inputs) * self.scale)
            if number == 1:
                self.inside(block)
        return inputs.square().mean()


def build(cls: type[nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, fused=True)


def start(model: nn.Module, address: str, job: str, stage: int, home: str, **keys: Any) -> Engine:
    section: dict[str, Any] = {"stage": stage}
    if stage:
        section["offload_optimizer"] = {"device": home}
    if stage == 3:
        section["offload_param"] = {"device": home}
    config = config_of(address, job) | {"zero_optimization": section} | keys
    return trainer_client.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]


def nothing(_: nn.Module) -> None:
    """Change nothing outside of the forward."""


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def clamp_in_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        values = parameter.detach().numpy()
        values.clip(-0.3, 0.3, out=values)


def halve_as_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())


def average(model: Any) -> None:
    """Keep an average of a layer in the model, as MoCo, BYOL and DINO do."""
    for ours, theirs in zip(model.average.parameters(), model.blocks[0].parameters(), strict=True):
        ours.data = ours.data * 0.9 + theirs.data * 0.1


def mask(model: Any) -> None:
    model.blocks[1].weight.data.mul_(torch.arange(64).view(8, 8) % 3 > 0)


CHANGES = [nothing, clamp, clamp_data, clamp_in_numpy, halve_as_vector, average, mask]


@pytest.mark.parametrize(("stage", "home"), HOMES)
@pytest.mark.parametrize("when", ["after the step", "before the step"])
def test_changes_count_as_in_plain_pytorch_also_over_a_resume(
    model_store: str, job: str, stage: int, home: str, when: str
) -> None:
    """The second run begins after a change that came after the last step of the first."""
    for change in CHANGES:
        plain = build()
        optimizer = optimizer_of(plain)
        expected = []
        for step in range(STEPS):
            loss = plain(batch(step))
            loss.backward()
            if when == "before the step":
                change(plain)
            optimizer.step()
            optimizer.zero_grad()
            if when == "after the step":
                change(plain)
            expected.append(loss.item())

        losses = []
        for steps in (range(2), range(2, STEPS)):
            model = build()
            with start(model, model_store, f"{job}-{change.__name__}", stage, home) as engine:
                for step in steps:
                    loss = engine(batch(step))
                    engine.backward(loss)
                    if when == "before the step":
                        change(model)
                    engine.step()
                    if when == "after the step":
                        change(model)
                    losses.append(loss.item())
                weights = engine.full_state_dict()
                local = engine.get_local("scale", "master")

        assert losses == expected, change.__name__
        assert [name for name, value in plain.state_dict().items() if not torch.equal(weights[name], value)] == []
        assert local is not None and torch.equal(local, plain.get_parameter("scale"))


@pytest.mark.parametrize(("stage", "home"), HOMES)
def test_elements_of_16_bits_that_are_changed_become_the_master_weights_and_others_keep_theirs(
    model_store: str, job: str, stage: int, home: str
) -> None:
    model = build(Plain)
    with start(model, model_store, job, stage, home, bf16={"enabled": True}) as engine:
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
        engine.step()
        name = "blocks.0.weight"
        weight, before = model.get_parameter(name), engine.full_state_dict()[name]
        weight.data[:4] = 0.25
        changed = engine.full_state_dict()[name]
        assert torch.equal(changed[:4], torch.full((4, 8), 0.25))
        assert torch.equal(changed[4:], before[4:]) and not torch.equal(before, before.bfloat16().float())

        reference = nn.Parameter(changed.clone())
        torch_optimizer = AdamW([reference], lr=0.05, fused=True)
        moments = {kind: engine.get_full(name, kind) for kind in ("exp_avg", "exp_avg_sq")}
        torch_optimizer.state[reference] = {"step": torch.tensor(1.0), **moments}
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
        reference.grad = engine.get_full(name, "grad")
        torch_optimizer.step()
        engine.step()

        assert torch.equal(engine.full_state_dict()[name], reference.detach())
        assert torch.equal(weight.float(), reference.detach().bfloat16().float())


def test_a_checkpoint_and_an_evaluation_have_what_was_changed(model_store: str, job: str, tmp_path: Any) -> None:
    model = build(Plain)
    with start(model, model_store, job, 2, "cpu") as engine:
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        clamp_data(model)
        changed = engine.full_state_dict()
        engine.save_checkpoint(tmp_path, "changed")
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        engine.load_checkpoint(tmp_path, "changed")
        loaded = engine.full_state_dict()
    assert [name for name, value in changed.items() if not torch.equal(value, loaded[name])] == []


@pytest.mark.parametrize("stage", [0, 2])
def test_a_change_that_no_gradient_follows_counts(model_store: str, job: str, stage: int) -> None:
    """A step that is skipped, and one of other parameters only, keep the changes, as torch does."""
    model = build(Plain)
    with start(model, model_store, job, stage, "cpu") as engine:
        clamp_data(model)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        engine.backward(engine(torch.full((2, 8), torch.nan)))
        engine.step()
        assert engine.skipped_steps == 1
        assert [n for n, v in engine.full_state_dict().items() if not torch.equal(v, expected[n])] == []


def changes_at_stage_3() -> Iterator[tuple[str, Callable[[nn.Module], None]]]:
    def by_function(block: nn.Module) -> None:
        with torch.no_grad():
            block.get_parameter("weight").clamp_(-0.01, 0.01)

    def by_numpy(block: nn.Module) -> None:
        block.get_parameter("weight").detach().numpy()[3, 5] = 7

    def by_assignment(block: nn.Module) -> None:
        block.get_parameter("bias").data = torch.zeros(8)

    yield from (("clamp", by_function), ("numpy", by_numpy), ("data", by_assignment))


@pytest.mark.parametrize("home", ["cpu", "nvme", "none"])
@pytest.mark.parametrize("gather", ["auto", "collective"])
def test_a_change_in_a_forward_at_stage_3_is_an_error_and_training_goes_on(
    model_store: str, job: str, home: str, gather: str
) -> None:
    plain: Any = build(Plain)
    optimizer = optimizer_of(plain)
    expected = []
    for _ in range(3):
        loss = plain(torch.ones(2, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    model: Any = build(Plain)
    with start(model, model_store, job, 3, home) as engine:
        losses = []
        for what, change in changes_at_stage_3():
            model.inside = change
            for mode in (torch.no_grad, torch.enable_grad):
                lost = pytest.raises(InPlaceChangeError, match=r"parameter blocks\.1\.\w+ was changed in place")
                with mode(), lost:
                    engine(torch.ones(2, 8))
            model.inside = nothing
            loss = engine(torch.ones(2, 8))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            assert what
        assert losses == expected


@pytest.mark.parametrize("home", ["cpu", "none"])
def test_a_change_in_a_backward_pass_at_stage_3_is_an_error(model_store: str, job: str, home: str) -> None:
    """An optimizer that steps in hooks of parameters is an example."""
    model: Any = build(Plain)

    def step(parameter: torch.Tensor) -> None:
        parameter.data.sub_(0.1)

    model.blocks[0].weight.register_post_accumulate_grad_hook(step)
    engine = start(model, model_store, job, 3, home)
    with pytest.raises(InPlaceChangeError, match=r"blocks\.0\.weight"):
        engine.backward(engine(torch.ones(2, 8)))
    engine.close()


def test_rows_that_an_embedding_renormalizes_at_stage_3_are_an_error(model_store: str, job: str) -> None:
    model = build()
    model.get_buffer("is_initialized").fill_(True)
    lost = pytest.raises(InPlaceChangeError, match=r"parameter embedding\.weight was changed")
    with start(model, model_store, job, 3, "cpu") as engine, lost:
        engine(batch(0))


@pytest.mark.parametrize("home", ["cpu", "none"])
def test_a_change_of_gathered_parameters_without_a_modifier_is_an_error_or_a_warning(
    model_store: str, job: str, home: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = build(Plain)
    with start(model, model_store, job, 3, home) as engine:
        before = engine.full_state_dict()
        weight = model.blocks[0].weight
        with pytest.raises(InPlaceChangeError, match=r"blocks\.0\.weight"), engine.gathered(model.blocks[0]):
            weight.data.zero_()
        with caplog.at_level(logging.WARNING), zero.GatheredParameters([weight]):
            weight.data.zero_()
        assert "GatheredParameters(modifier_rank=None): parameter blocks.0.weight was changed in place" in caplog.text
        with engine.gathered(model.blocks[0]), engine.gathered([weight], modifier_rank=0):
            weight.data.mul_(2)
        after = engine.full_state_dict()
    assert torch.equal(after.pop("blocks.0.weight"), before.pop("blocks.0.weight") * 2)
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def test_updates_that_begin_early_for_good_wait_where_a_parameter_was_changed(model_store: str, job: str) -> None:
    plain = build(Plain)
    optimizer = optimizer_of(plain)
    model = build(Plain)
    section = {"address": model_store, "job": job, "durability": "step", "early_updates": "final"}
    with start(model, model_store, job, 2, "nvme", paramserver=section) as engine:
        for _ in range(3):
            loss = plain(torch.ones(2, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clamp_data(plain)
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()
            clamp_data(model)
        weights = engine.full_state_dict()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(weights[name], value)] == []


def test_a_tensor_of_another_kind_in_a_parameter_is_refused_before_the_step(model_store: str, job: str) -> None:
    model: Any = build(Plain)
    with start(model, model_store, job, 2, "cpu") as engine:
        engine.backward(engine(torch.ones(2, 8)))
        former = model.scale.data
        model.scale.data = torch.ones(4)
        with pytest.raises(ConfigError, match=r"parameter scale has become a tensor of .* with shape \[4\]"):
            engine.step()
        model.scale.data = former


def test_two_ranks_make_the_same_changes_or_have_an_error(model_store: str) -> None:
    run_ranks("tests.integration.support.in_place_ranks", 2, model_store)


def test_sgd_without_states_updates_what_was_changed(model_store: str, job: str) -> None:
    def train(model: nn.Module, call: Any, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(3):
            loss = call(torch.ones(2, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clamp_data(model)
            losses.append(loss.item())
        return losses

    plain = build(Plain)
    expected = train(plain, plain, SGD(plain.parameters(), lr=0.5))
    model = build(Plain)
    config = config_of(model_store, job) | {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    optimizer = SGD(model.parameters(), lr=0.5)
    with trainer_client.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
        assert train(model, engine, engine.optimizer) == expected
