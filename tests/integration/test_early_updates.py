"""Updates that begin in the backward pass give the same bits as updates that wait for the step, whatever happens
between backward and step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.support.model_runs import LEARNING_RATE, build, config_of, optimizer_of, start
from tests.integration.support.training import micro_batches
from trainer_client import ConfigError, Engine, PhaseError
from trainer_client.training.access import ParameterKey

BATCHES = list(micro_batches(6))
PLACEMENTS = {
    "nvme": {"parameters": "nvme", "optimizer": "nvme"},
    "host": {"parameters": "host", "optimizer": "host"},
    "device and nvme": {"parameters": "device", "optimizer": "nvme", "gradients": "host"},
}
AT_EACH_PLACE = pytest.mark.parametrize("place", PLACEMENTS)
# An act is called in step `number` between backward and step. It gets an engine, or a plain model with its optimizer
# and loss.
Act = Callable[[int, Any], None]


def train_plain(
    model: nn.Module, act: Act, clipping: float, batches: Sequence[torch.Tensor] = BATCHES
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    optimizer = optimizer_of(model)
    losses = []
    for number, batch in enumerate(batches):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.detach().clone())
        act(number, (model, optimizer, loss))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clipping or torch.inf)
        if bool(norm.isfinite()):
            optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


def train_stored(
    model: nn.Module, act: Act, clipping: float, config: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int, int]:
    """Train through the store. Return the losses, the weights, the number of updates that began early, and how many of
    them were withdrawn."""
    losses = []
    with start(model, config | {"gradient_clipping": clipping}) as engine:
        for number, batch in enumerate(BATCHES):
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            losses.append(loss.detach().clone())
            act(number, engine)
            engine.step()
        early = engine._passes._step._updates._early
        return losses, engine.full_state_dict(), early.begun, early.withdrawn


def run_both(
    address: str, job: str, place: str, plain: Act, stored: Act, clipping: float = 0.0, **section: Any
) -> tuple[int, int]:
    """Train both ways and assert the same bits. Return the number of updates that began early, and how many of them
    were withdrawn."""
    model = build("gpt2-zoo")
    expected_losses, expected = train_plain(copy.deepcopy(model), plain, clipping)
    section = {"durability": "step", "placement": PLACEMENTS[place], **section}
    config = config_of(address, f"{job} {place}", **section)
    config["zero_optimization"] = {"stage": 2 if "device" in place else 3}
    losses, weights, begun, withdrawn = train_stored(model, stored, clipping, config)
    assert [torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True)] == [True] * len(BATCHES)
    assert [name for name, value in expected.items() if not torch.equal(value, weights[name])] == []
    return begun, withdrawn


def nothing(number: int, what: Any) -> None:
    pass


@AT_EACH_PLACE
def test_nothing_comes_in_between(model_store: str, place: str) -> None:
    begun, withdrawn = run_both(model_store, "undisturbed", place, nothing, nothing)
    assert begun >= 2 * len(BATCHES)
    assert withdrawn == 0


def test_it_can_be_turned_off(model_store: str) -> None:
    assert run_both(model_store, "late", "nvme", nothing, nothing, early_updates=False) == (0, 0)


@AT_EACH_PLACE
def test_final_updates(model_store: str, place: str) -> None:
    begun, withdrawn = run_both(model_store, "final", place, nothing, nothing, early_updates="final")
    assert begun >= 2 * len(BATCHES)
    assert withdrawn == 0


# Each act breaks the promise of final updates. These are refused before they change anything.
REFUSED: dict[str, Callable[[Engine], object]] = {
    "a gradient is read": lambda engine: engine.get_full("transformer.wte.weight", "grad"),
    "a rank's part of a gradient is read": lambda engine: engine.get_local("transformer.wte.weight", "grad"),
    "a gradient is set": lambda engine: engine.set_full("transformer.ln_f.bias", "grad", torch.zeros(32)),
    "a weight is set": lambda engine: engine.set_full("transformer.ln_f.bias", "master", torch.zeros(32)),
    "the norm is clipped": lambda engine: engine.clip_grad_norm_(1.0),
}


def step_with_another_rate(engine: Engine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.step()


def go_backward_again(engine: Engine) -> None:
    engine.backward(engine(input_ids=BATCHES[1], labels=BATCHES[1]).loss)


def test_final_updates_refuse_what_would_make_them_again(model_store: str) -> None:
    def begin(job: str) -> Engine:
        section: dict[str, Any] = {"placement": PLACEMENTS["nvme"], "early_updates": "final"}
        config = config_of(model_store, job, durability="step", **section) | {"zero_optimization": {"stage": 3}}
        engine = start(build("gpt2-zoo"), config)
        engine.backward(engine(input_ids=BATCHES[0], labels=BATCHES[0]).loss)
        return engine

    with begin("final refuses") as engine:
        for act in REFUSED.values():
            with pytest.raises(PhaseError, match='early_updates is "final"'):
                act(engine)
        engine.step()
        refused = engine.full_state_dict()
    _, expected = train_plain(build("gpt2-zoo"), nothing, 0.0, BATCHES[:1])
    assert [name for name, value in expected.items() if not torch.equal(value, refused[name])] == []
    for broken in (step_with_another_rate, go_backward_again):
        with begin(broken.__name__) as engine, pytest.raises(PhaseError, match='early_updates is "final"'):
            broken(engine)


@AT_EACH_PLACE
def test_the_learning_rate_changes(model_store: str, place: str) -> None:
    def plain(number: int, what: Any) -> None:
        what[1].param_groups[0]["lr"] = LEARNING_RATE / (1 + number % 3)

    def stored(number: int, engine: Engine) -> None:
        engine.optimizer.param_groups[0]["lr"] = LEARNING_RATE / (1 + number % 3)

    begun, withdrawn = run_both(model_store, "rates", place, plain, stored)
    # In each step but the first, the learning rate differs from the one with which early updates began.
    assert begun > withdrawn >= 2 * (len(BATCHES) - 1)


@AT_EACH_PLACE
def test_clipping_comes_and_goes(model_store: str, place: str) -> None:
    """The limit is the median norm, so some steps are clipped and others are not."""
    norms = []

    def note(number: int, what: Any) -> None:
        norms.append(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in what[0].parameters()])).item())

    train_plain(build("gpt2-zoo"), note, 0.0)
    limit = sorted(norms)[len(norms) // 2]
    begun, withdrawn = run_both(model_store, "clipping", place, nothing, nothing, clipping=limit)
    assert begun > 0
    assert withdrawn <= begun


@AT_EACH_PLACE
def test_a_gradient_is_not_finite(model_store: str, place: str) -> None:
    """The non-finite gradients appear after the backward pass, when all early updates have begun, and the step is
    skipped."""

    def poison(number: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and number in (1, 3):
                parameter.grad.fill_(torch.nan)

    def stored(number: int, engine: Engine) -> None:
        if number in (1, 3):
            name, parameter = next(iter(engine.module.named_parameters()))
            engine.set_full(name, "grad", torch.full(parameter.shape, torch.nan))

    begun, withdrawn = run_both(model_store, "poisoned", place, lambda n, what: poison(n, what[0]), stored)
    assert begun > withdrawn > 0


@AT_EACH_PLACE
def test_a_gradient_is_set(model_store: str, place: str) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"

    def plain(number: int, what: Any) -> None:
        what[0].get_parameter(name).grad.mul_(0.5)

    def stored(number: int, engine: Engine) -> None:
        gradient = engine.get_full(name, "grad")
        assert gradient is not None
        engine.set_full(name, "grad", gradient * 0.5)

    begun, withdrawn = run_both(model_store, "set", place, plain, stored)
    assert withdrawn == len(BATCHES) < begun


@AT_EACH_PLACE
def test_weights_and_moments_are_set(model_store: str, place: str) -> None:
    """The step updates the values that were set after its backward pass, with the gradient from before."""
    name = "transformer.h.1.mlp.c_fc.weight"

    def plain(number: int, what: Any) -> None:
        weight = what[0].get_parameter(name)
        with torch.no_grad():
            weight.mul_(0.5)
            if number:
                what[1].state[weight]["exp_avg"].add_(0.01)

    def stored(number: int, engine: Engine) -> None:
        weight, moment = engine.get_full(name, "master"), engine.get_full(name, "exp_avg")
        assert weight is not None and moment is not None
        values: dict[tuple[ParameterKey, str], torch.Tensor] = {(name, "master"): weight * 0.5}
        if number:
            values[name, "exp_avg"] = moment + 0.01
        engine.set_many(values)
        changed = engine.get_full(name, "master")
        assert changed is not None and torch.equal(changed, weight * 0.5)

    begun, withdrawn = run_both(model_store, "weights set", place, plain, stored)
    assert begun == withdrawn > 0


@AT_EACH_PLACE
def test_the_model_is_used_before_the_step(model_store: str, place: str) -> None:
    """A forward before the step computes with the weights of the former step, and so does a second backward pass of the
    same step."""
    seen: dict[str, list[torch.Tensor]] = {"plain": [], "stored": []}

    def plain(number: int, what: Any) -> None:
        model = what[0]
        batch = BATCHES[(number + 1) % len(BATCHES)]
        with torch.no_grad():
            seen["plain"].append(model(input_ids=batch, labels=batch).loss)
        if number % 2:
            model(input_ids=batch, labels=batch).loss.backward()

    def stored(number: int, engine: Engine) -> None:
        batch = BATCHES[(number + 1) % len(BATCHES)]
        with torch.no_grad():
            seen["stored"].append(engine(input_ids=batch, labels=batch).loss)
        if number % 2:
            engine.backward(engine(input_ids=batch, labels=batch).loss)

    begun, withdrawn = run_both(model_store, "used", place, plain, stored)
    assert [torch.equal(a, b) for a, b in zip(*seen.values(), strict=True)] == [True] * len(BATCHES)
    assert begun > withdrawn > 0


@AT_EACH_PLACE
def test_gradients_of_inputs_alone_are_asked_for_before_the_step(model_store: str, place: str) -> None:
    """Such a pass goes through all units, whose gradients are complete already, and changes none of them."""

    def grad(number: int, model: Any) -> None:
        torch.manual_seed(number)
        inputs = torch.randn(2, 8, 32, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(inputs_embeds=inputs).logits.square().mean(), inputs)
        found.append(gradient)

    found: list[torch.Tensor] = []
    begun, withdrawn = run_both(
        model_store,
        "inputs",
        place,
        lambda number, plain: grad(number, plain[0]),
        grad,
    )
    assert begun > 0 and withdrawn == 0
    plain, stored = found[: len(BATCHES)], found[len(BATCHES) :]
    assert all(torch.equal(one, other) for one, other in zip(plain, stored, strict=True))


def test_weights_are_read_as_they_were(model_store: str) -> None:
    """Reads by name between backward and step give the former weights and moments, although their updates have
    begun."""
    config = config_of(model_store, "read", durability="step", placement=PLACEMENTS["nvme"])
    config["zero_optimization"] = {"stage": 3}
    with start(build("gpt2-zoo"), config) as engine:
        for batch in BATCHES[:3]:
            before = engine.full_state_dict()
            moments = engine.sharded_state_dict("exp_avg")
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            between = engine.full_state_dict()
            assert [name for name in before if not torch.equal(before[name], between[name])] == []
            again = engine.sharded_state_dict("exp_avg")
            assert [name for name in moments if not torch.equal(moments[name].values, again[name].values)] == []
            engine.step()
            after = engine.full_state_dict()
            assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_settings_that_no_update_can_have_begin_none(model_store: str) -> None:
    """The step is made after they were corrected, although its backward pass ran with them."""
    model = build("gpt2-zoo")
    _, expected = train_plain(copy.deepcopy(model), nothing, 0.0)
    config = config_of(model_store, "impossible rate", durability="step", placement=PLACEMENTS["nvme"])
    config["zero_optimization"] = {"stage": 3}
    with start(model, config) as engine:
        group = engine.optimizer.param_groups[0]
        for number, batch in enumerate(BATCHES):
            group["lr"] = -1.0 if number == 2 else LEARNING_RATE
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            if number == 2:
                with pytest.raises(ConfigError, match=r"adamw\.lr = -1\.0 is out of its range"):
                    engine.step()
                group["lr"] = LEARNING_RATE
            engine.step()
        weights = engine.full_state_dict()

    assert [name for name, value in expected.items() if not torch.equal(value, weights[name])] == []
