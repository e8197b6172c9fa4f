"""What a loop or a config says about single steps has the bits of plain PyTorch: clipping by a call, autocast by the
config, and steps whose micro-batches the engine does not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.equality import assert_equal
from tests.integration.support.failing import WIDTH, inputs
from trainer_client.errors import PhaseError

RATE = 1e-2
STEPS = 5
OFFLOADED: dict[str, Any] = {
    "stage": 3,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
}
PLACES: dict[str, dict[str, Any]] = {"device": {"stage": 2}, "store": OFFLOADED}


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def start(address: str, job: str, zero: dict[str, Any], **keys: Any) -> trainer_client.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 1e-2}},
        "zero_optimization": zero,
        "paramserver": {"address": address, "job": job},
        **keys,
    }
    return trainer_client.initialize(model=build(), config=config)[0]


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-2, fused=True)


def assert_same_weights(engine: trainer_client.Engine, plain: nn.Module) -> None:
    assert_equal(engine.full_state_dict(), plain.state_dict())


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs(number)) * 3 - 1).float().square().mean()
    return loss


@pytest.mark.parametrize("place", PLACES)
def test_a_call_clips_one_step(model_store: str, job: str, place: str) -> None:
    """The third step is clipped by value, the fourth is not clipped, and the limit of the last one is never reached."""
    plain = build()
    optimizer = plain_optimizer(plain)
    limits = [0.3, 0.3, None, 0.0, 1e6]
    with start(model_store, job, PLACES[place]) as engine:
        for number, limit in enumerate(limits):
            loss, expected = loss_of(engine, number), loss_of(plain, number)
            engine.backward(loss)
            expected.backward()
            if limit is None:
                engine.clip_grad_value_(1e-3)
                nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
            elif limit:
                norm = nn.utils.clip_grad_norm_(plain.parameters(), limit)
                assert engine.clip_grad_norm_(limit) == float(norm)
                with pytest.raises(RuntimeError, match="clipped already"):
                    engine.clip_grad_value_(limit)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == expected.item()
        assert_same_weights(engine, plain)


@pytest.mark.parametrize("place", PLACES)
def test_a_limit_that_is_not_positive_is_refused_and_an_infinite_one_clips_nothing(
    model_store: str, job: str, place: str
) -> None:
    plain = build()
    optimizer = plain_optimizer(plain)
    with start(model_store, job, PLACES[place]) as engine:
        for number, clip in enumerate((engine.clip_grad_value_, engine.clip_grad_norm_)):
            engine.backward(loss_of(engine, number))
            loss_of(plain, number).backward()
            for limit in (0.0, -0.5, torch.nan):
                with pytest.raises(ValueError, match=rf"{clip.__name__}\({limit}\): write a positive limit"):
                    clip(limit)
            clip(torch.inf)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(engine, plain)


def test_clipping_needs_the_gradient_of_a_whole_step(model_store: str, job: str) -> None:
    with start(model_store, job, OFFLOADED, gradient_accumulation_steps=2) as engine:
        with pytest.raises(RuntimeError, match="there is no gradient"):
            engine.clip_grad_norm_(1.0)
        engine.backward(loss_of(engine, 0))
        with pytest.raises(RuntimeError, match="just before step"):
            engine.clip_grad_norm_(1.0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("place", PLACES)
def test_autocast_by_the_config_is_that_of_torch(model_store: str, job: str, place: str, dtype: str) -> None:
    """In fp16 the loss is scaled as by torch's GradScaler, also after the overflow in the second step."""
    plain = build()
    optimizer = plain_optimizer(plain)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "fp16")
    cast = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    section = {"enabled": True, "dtype": f"torch.{str(cast).removeprefix('torch.')}"}
    with start(model_store, job, PLACES[place], torch_autocast=section) as engine:
        assert engine.torch_autocast_dtype() is cast
        for number in range(STEPS):
            factor = 1e6 if number == 1 and dtype == "fp16" else 1.0
            output = engine(inputs(number))
            loss = (output * 3 - 1).float().square().mean() * factor
            with torch.autocast("cpu", cast):
                plain_output = plain(inputs(number))
            expected = (plain_output * 3 - 1).float().square().mean() * factor
            engine.backward(loss)
            scaler.scale(expected).backward()
            engine.step()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert output.dtype is plain_output.dtype
            assert loss.item() == expected.item()
            assert engine.loss_scaler.scale == scaler.get_scale()
        assert engine.skipped_steps == (1 if dtype == "fp16" else 0)
        assert_same_weights(engine, plain)


@pytest.mark.parametrize("place", PLACES)
def test_a_loop_may_count_the_micro_batches_itself(model_store: str, job: str, place: str) -> None:
    """Steps have one, two and three backward passes, and a gradient that the loop drops is not part of any."""
    plain = build()
    optimizer = plain_optimizer(plain)
    keys = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    with start(model_store, job, PLACES[place], **keys) as engine:
        engine.backward(loss_of(engine, 9))
        engine.zero_grad()
        for number, passes in enumerate([1, 2, 3]):
            for _ in range(passes):
                engine.backward(loss_of(engine, number))
                (loss_of(plain, number) / 2).backward()
            engine.allreduce_gradients(bucket_size=1)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        assert (engine.global_steps, engine.global_samples) == (3, 4 * 6)
        assert_same_weights(engine, plain)
        with pytest.raises(PhaseError, match="managed_gradient_accumulation"):
            engine.set_gradient_accumulation_boundary(True)


def test_a_step_within_no_sync_is_refused_and_may_follow_it(model_store: str, job: str) -> None:
    """The errors of a wrong order of calls are AssertionErrors, too, because scripts for DeepSpeed expect these."""
    plain = build()
    optimizer = plain_optimizer(plain)
    with start(model_store, job, PLACES["device"]) as engine:
        with pytest.raises(AssertionError, match=r"step\(\) without backward"):
            engine.step()
        with engine.no_sync():
            engine.backward(loss_of(engine, 0))
            with pytest.raises(AssertionError, match=r"illegal to call Engine\.step\(\) inside no_sync"):
                engine.step()
        engine.step()
        loss_of(plain, 0).backward()
        optimizer.step()
        assert_same_weights(engine, plain)
    with pytest.raises(AssertionError, match="gradient_clipping"):
        start(model_store, job, PLACES["device"], gradient_clipping=-1)
