"""What loops do with graphs of forwards beside one backward pass: an engine computes, and refuses, what plain PyTorch
does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainer_client
from tests.integration.support.three_blocks import RATE, STAGES, WIDTH, ThreeBlocks, inputs, start
from trainer_client.errors import PhaseError
from trainer_client.training.model.released import ReleasedParameter


class Net(ThreeBlocks):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).square().mean()


def step(engine: trainer_client.Engine, _: Path) -> None:
    engine.step()


def load(engine: trainer_client.Engine, directory: Path) -> None:
    engine.zero_grad()
    engine.load_checkpoint(directory)


@pytest.mark.parametrize("change", [step, load])
@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_from_before_a_change_of_the_weights_is_refused(
    model_store: str, job: str, stage: str, change: Callable[[trainer_client.Engine, Path], None], tmp_path: Path
) -> None:
    """Its gradients would mix those of two steps."""
    engine = start(model_store, job, Net(), STAGES[stage])
    if change is load:
        engine.save_checkpoint(tmp_path)
    loss = engine(inputs())
    engine.backward(loss, retain_graph=True)
    change(engine, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)
    with pytest.raises(PhaseError, match="restart the job"):
        engine.step()
    engine.close_without_commit()


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_weights_that_did_not_change_outlives_a_step(model_store: str, job: str, stage: str) -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    ours, plain = inputs().requires_grad_(), inputs().requires_grad_()
    deepcopy(model).blocks[0](plain).sum().backward()
    with start(model_store, job, model, STAGES[stage]) as engine:
        hidden = engine.module.blocks[0](ours)
        engine.backward(engine(inputs(1)))
        engine.step()
        hidden.sum().backward()
        assert ours.grad is not None and plain.grad is not None
        assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_of_the_users_over_reentrant_checkpoints_of_parts_is_one_pass(
    model_store: str, job: str, stage: str
) -> None:
    """Each checkpoint runs a pass of its own within the user's. The loss scale is known in the first of them only."""

    def gradients(run: Callable[[nn.Module, torch.Tensor], torch.Tensor], name: str) -> list[torch.Tensor | None]:
        keys = {
            "fp16": {"enabled": True, "initial_scale_power": 8},
            "managed_gradient_accumulation": False,
        }
        model = Net()
        engine = start(model_store, f"{job}-{name}", model, STAGES[stage], **keys)
        with engine:
            hidden = inputs().half().requires_grad_()
            for block in model.blocks:
                hidden = run(block, hidden)
            engine.scale(hidden.float().square().mean()).backward()
            found = [engine.get_full(name, "grad") for name, _ in model.named_parameters()]
            engine.step()
            assert engine.global_samples == 2
        return found

    whole = gradients(lambda block, hidden: block(hidden), "whole")
    checkpointed = gradients(lambda block, hidden: checkpoint(block, hidden, use_reentrant=True), "checkpointed")
    torch.testing.assert_close(checkpointed, whole, rtol=0, atol=0)


class Aside(nn.Module):
    """A block that leaves a result beside its output, which it computes before the output or after it."""

    def __init__(self, kind: str, place: str) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.place = place
        self.results: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.place == "before":
            self._leave(self.other(torch.tanh(self.other(hidden))))
            return torch.tanh(self.one(torch.tanh(self.one(hidden))))
        hidden = torch.tanh(self.one(hidden))
        self._leave(self.other(torch.tanh(self.other(hidden))))
        return hidden

    def _leave(self, result: torch.Tensor) -> None:
        if self.kind == "tensor":
            self.result = result.square().mean()
        else:
            self.results.append(result.square().mean())

    @property
    def loss(self) -> torch.Tensor:
        return self.result if self.kind == "tensor" else self.results[-1]


class Asides(Net):
    """A model whose loss depends on the results beside the outputs, and perhaps also on the outputs."""

    def __init__(self, kind: str, place: str, *, alone: bool) -> None:
        super().__init__(lambda: Aside(kind, place))
        self.alone = alone

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        loss = super().forward(hidden)
        losses: list[Any] = [block.loss for block in self.blocks]
        beside = torch.stack(losses).sum()
        return beside if self.alone else loss + beside


def assert_trained_alike(
    address: str, job: str, model: nn.Module, zero: dict[str, Any], act: Callable[[Any, Any], None] | None = None
) -> None:
    """Assert that two steps give an engine the weights of the plain model.

    Args:
        act: computes a loss of a model, and calls its second argument with it; None: of the model's output.
    """

    def act_simply(model: Any, backward: Any) -> None:
        backward(model(inputs()))

    act = act or act_simply
    plain = deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    with start(address, job, model, zero) as engine:
        for _ in range(2):
            act(engine, engine.backward)
            engine.step()
            act(plain, torch.Tensor.backward)
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.full_state_dict()
    torch.testing.assert_close(weights, dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("alone", [False, True], ids=["with the output", "alone"])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", ["tensor", "list"])
def test_results_that_units_leave_in_attributes_have_right_gradients(
    model_store: str, job: str, kind: str, place: str, alone: bool
) -> None:
    """Their gradients may come before those of the outputs, when the unit is released, or without them."""
    assert_trained_alike(model_store, job, Asides(kind, place, alone=alone), STAGES["3-store"])


class Shown:
    """A holder of a tensor that the hooks do not know."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    """A block whose output has a tensor, and an object that hides a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Shown]:
        hidden = torch.tanh(self.one(hidden))
        return hidden, Shown(self.other(torch.tanh(self.other(hidden))).square().mean())


class HidingNet(Net):
    def __init__(self) -> None:
        super().__init__(Hiding)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        losses = []
        for block in self.blocks:
            hidden, shown = block(hidden)
            losses.append(shown.value)
        return hidden.square().mean() + torch.stack(losses).sum()


def test_a_result_that_an_object_beside_the_output_hides_has_right_gradients(model_store: str, job: str) -> None:
    assert_trained_alike(model_store, job, HidingNet(), STAGES["3-store"])


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_of_a_gradient_trains_as_in_plain_torch(model_store: str, job: str, stage: str) -> None:
    def penalize(model: Any, backward: Any) -> None:
        leaf = inputs().requires_grad_()
        loss = model(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        backward(loss + gradient.square().sum())

    assert_trained_alike(model_store, job, Net(), STAGES[stage], penalize)


class Energy(Net):
    """A model that computes a gradient in its forward, and whose loss may depend on it."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.trains = trains

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        place = hidden.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(place)
            (force,) = torch.autograd.grad(energy, place, create_graph=self.trains, retain_graph=True)
        return energy + force.square().sum()


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_may_compute_gradients(model_store: str, job: str, stage: str, trains: bool) -> None:
    def evaluate_and_train(model: Any, backward: Any) -> None:
        with torch.no_grad():
            evaluated = model(inputs(1))
        backward(model(inputs()) * evaluated)

    assert_trained_alike(model_store, job, Energy(trains=trains), STAGES[stage], evaluate_and_train)


@pytest.mark.parametrize("verb", ["loss.backward", "engine.backward", "engine.forward"])
def test_a_forward_may_not_call_the_engine(model_store: str, job: str, verb: str) -> None:
    model = Net()
    with start(model_store, job, model, STAGES["3-store"]) as engine:

        def call(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            hook.remove()
            if verb == "loss.backward":
                output.sum().backward()
            elif verb == "engine.backward":
                engine.backward(output.sum())
            else:
                engine(inputs())

        hook = model.blocks[1].register_forward_hook(call)
        with pytest.raises(PhaseError, match=r"torch\.autograd\.grad"):
            engine(inputs())
        assert engine(inputs()).isfinite()


class Wrapping(nn.Module):
    """A block whose output hides the only tensor, so that the block stays gathered from its forward to its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> Shown:
        return Shown(self.inner(hidden))


class WrappingNet(Net):
    def __init__(self) -> None:
        super().__init__(Wrapping)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden).value
        return hidden.square().mean()


@pytest.mark.parametrize("stage", ["3", "3-store"])
def test_the_end_of_gathered_frees_nothing_that_a_backward_waits_for(model_store: str, job: str, stage: str) -> None:
    def train(model: Any, backward: Any) -> None:
        is_engine = isinstance(model, trainer_client.Engine)
        with (
            model.gathered(model.module.blocks) if is_engine else nullcontext(),
            model.gathered(model.module.blocks[0]) if is_engine else nullcontext(),
        ):
            loss = model(inputs())
        backward(loss)
        if is_engine:
            assert all(isinstance(parameter, ReleasedParameter) for parameter in model.module.blocks.parameters())

    assert_trained_alike(model_store, job, WrappingNet(), STAGES[stage], train)
