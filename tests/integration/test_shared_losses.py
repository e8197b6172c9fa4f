"""One loss of several engines gives each engine the gradients of plain PyTorch, whatever their loss scales and their
accumulation steps are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.failing import WIDTH, inputs

RATE = 0.125
STEPS = 4
FP32: dict[str, Any] = {}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
STAGE_3: dict[str, Any] = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


def fp16(**section: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": 8, **section}}


def build(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def start(address: str, job: str, number: int, keys: dict[str, Any]) -> trainer_client.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "paramserver": {"address": address, "job": f"{job}-{number}"},
        **keys,
    }
    return trainer_client.initialize(model=build(number), config=config)[0]


def shared_loss(models: list[Any], step: int) -> torch.Tensor:
    """Return a loss in which the second model's output is multiplied by that of the first one."""
    first, *rest = (model(inputs(step)).float() for model in models)
    product = first
    for output in rest:
        product = product * (output + 1)
    return (product - 1).square().mean()


def difference(engines: list[trainer_client.Engine], plain: list[nn.Module]) -> float:
    """Return the largest difference of a weight, between engines and plain models."""
    pairs = [(e.full_state_dict(), p.state_dict()) for e, p in zip(engines, plain, strict=True)]
    return max(float((ours[name] - value).abs().max()) for ours, theirs in pairs for name, value in theirs.items())


MIXES: dict[str, tuple[list[dict[str, Any]], float]] = {
    "fp32": ([FP32, STAGE_3], 1e-6),
    "bf16": ([BF16, BF16, FP32], 5e-3),
    "fp16": ([fp16(), fp16()], 2e-3),
    "fp16 of different scales": ([fp16(), fp16(initial_scale_power=3), fp16(loss_scale=96.0)], 2e-3),
    "fp16 beside fp32": ([FP32, fp16(), STAGE_3], 2e-3),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_loss_that_every_engine_has_scaled_trains_all_of_them(model_store: str, job: str, mix: str) -> None:
    keys, tolerance = MIXES[mix]
    engines = [start(model_store, job, number, each) for number, each in enumerate(keys)]
    plain = [build(number) for number in range(len(engines))]
    optimizer = torch.optim.SGD([p for model in plain for p in model.parameters()], lr=RATE)
    for step in range(STEPS):
        loss = shared_loss(list(engines), step)
        before = loss.detach()
        for engine in engines:
            loss = engine.scale(loss)
        scales = [engine.optimizer.cur_scale for engine in engines if engine.optimizer.needs_scaler()]
        assert torch.equal(loss, before * min(scales, default=1.0))
        loss.backward()
        for engine in engines:
            engine._backward_epilogue()
            engine.step()
            engine.optimizer.zero_grad()
        shared_loss(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = difference(engines, plain)
    for engine in reversed(engines):
        assert engine.skipped_steps == 0
        engine.destroy()
    assert found < tolerance


def test_an_overflow_of_one_engine_lowers_the_scale_of_the_shared_loss(model_store: str, job: str) -> None:
    """The second engine lowers its scale, and from then on the loss has that scale for the first engine, too."""
    keys = [fp16(hysteresis=1), fp16(hysteresis=1)]
    engines = [start(model_store, job, number, each) for number, each in enumerate(keys)]
    scales = []
    for factor in (1.0, torch.inf, 1.0):
        first, second = (engine(inputs(0)).float().mean() for engine in engines)
        loss = first + second * factor
        before = loss.item()
        for engine in engines:
            loss = engine.scale(loss)
        scales.append(loss.item() / before if factor == 1.0 else 0.0)
        loss.backward()
        gradient = engines[0].get_full("2.bias", "grad")
        assert gradient is not None and gradient.item() == 1.0
        for engine in engines:
            engine.step()
    shown = [(engine.optimizer.cur_scale, engine.skipped_steps) for engine in engines]
    for engine in reversed(engines):
        engine.destroy()
    assert shown == [(256.0, 0), (128.0, 1)]
    assert scales == pytest.approx([256.0, 0.0, 128.0])


def test_a_loss_that_one_fp16_engine_has_not_scaled_is_refused(model_store: str, job: str) -> None:
    engines = [start(model_store, job, number, fp16()) for number in range(2)]
    with pytest.raises(RuntimeError, match="scale a loss of several engines with each of them"):
        engines[0].scale(shared_loss(list(engines), 0)).backward()
    for engine in reversed(engines):
        engine.close_without_commit()


def test_a_loss_of_modules_that_is_not_scaled_trains_fp16_engines_with_a_warning(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSpeed takes such a loss without an error, and gives its gradients as if the loss were scaled."""
    engines = [start(model_store, job, number, fp16()) for number in range(2)]
    plain = [build(number) for number in range(2)]
    optimizer = torch.optim.SGD([p for model in plain for p in model.parameters()], lr=RATE)
    for step in range(STEPS):
        shared_loss([engine.module for engine in engines], step).backward()
        gradient = engines[0].get_full("2.bias", "grad")
        shared_loss(plain, step).backward()
        expected = plain[0].get_parameter("2.bias").grad
        assert gradient is not None and expected is not None
        torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-3)
        for engine in engines:
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    found = difference(engines, plain)
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        shared_loss(list(engines), 0).backward()
    for engine in reversed(engines):
        engine.close_without_commit()
    assert found < 2e-3
    assert sum("is not scaled" in record.getMessage() for record in caplog.records) == 2


def test_losses_that_are_scaled_before_the_first_backward_pass_train_the_engine(model_store: str, job: str) -> None:
    """The bias is added to each output, so each pass gives it a gradient of 1, and half of it for half a loss."""

    def gradient_of(engine: trainer_client.Engine) -> float:
        gradient = engine.get_full("2.bias", "grad")
        assert gradient is not None
        return gradient.item()

    engine = start(model_store, job, 0, fp16())
    losses = [engine.scale(engine(inputs(number)).float().mean()) for number in range(3)]
    found = []
    for loss in (losses[1], losses[0] / 2):
        loss.backward()
        found.append(gradient_of(engine))
    # The third pass keeps its graph, and the fourth one comes from a sum of losses.
    losses[2].backward(retain_graph=True)
    (losses[2] + engine.scale(engine(inputs(3)).float().mean())).backward()
    found.append(gradient_of(engine))
    engine.step()
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(inputs(0)).float().mean().backward()
    engine.close_without_commit()
    assert found == [1.0, 1.5, 4.5]


def test_backward_of_one_engine_divides_the_gradients_of_another_one_once(model_store: str, job: str) -> None:
    """The engines have 4 and 2 accumulation steps, and each divides its own gradients by its own number."""
    engines = [start(model_store, job, n, {"gradient_accumulation_steps": steps}) for n, steps in enumerate((4, 2))]
    plain = [build(number) for number in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in plain]
    for micro_batch in range(4):
        engines[0].backward(shared_loss(list(engines), micro_batch))
        shared_loss(plain, micro_batch).backward()
        for engine, model, optimizer, every in zip(engines, plain, optimizers, (4, 2), strict=True):
            engine.step()
            if micro_batch % every == every - 1:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= every
                optimizer.step()
                optimizer.zero_grad()
    found = difference(engines, plain)
    for engine in reversed(engines):
        engine.destroy()
    assert found < 1e-6


def test_a_backward_pass_of_another_thread_changes_no_gradient(model_store: str, job: str) -> None:
    engines = [start(model_store, job, n, {"gradient_accumulation_steps": steps}) for n, steps in enumerate((4, 1))]
    has_begun, may_end = threading.Event(), threading.Event()

    def wait(_: torch.Tensor) -> None:
        has_begun.set()
        may_end.wait()

    output = engines[0](inputs(0))
    output.register_hook(wait)
    other = threading.Thread(target=engines[0].backward, args=(output.float().mean(),))
    other.start()
    try:
        assert has_begun.wait(60)
        engines[1](inputs(0)).float().mean().backward()
    finally:
        may_end.set()
        other.join()
    gradients = [engine.get_full("2.bias", "grad") for engine in engines]
    for engine in reversed(engines):
        engine.close_without_commit()
    assert [None if gradient is None else gradient.item() for gradient in gradients] == [0.25, 1.0]
