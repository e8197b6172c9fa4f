"""Models that are hard to gather, and other uses of a model, on an accelerator beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_client
from tests.device.training import assert_close
from tests.gpu.accelerator import NEEDS_ACCELERATOR, kind
from tests.integration.support.training import (
    Run,
    build_model,
    make_optimizer,
    micro_batches,
    store_config,
    train_plain,
    train_through_store,
    train_with_masters,
)

pytestmark = [
    *NEEDS_ACCELERATOR,
    pytest.mark.usefixtures("deterministic"),
    # peft 0.21 gives this warning with transformers 5.23.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

# The grouped products of Mixtral count experts by a kernel that the simulated device lacks.
ON_CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
MODELS = [
    *("conditional", "llama", "t5", "bert", "lora", "reused", "external", "checkpointed", "experts"),
    pytest.param("mixtral", marks=ON_CUDA_ONLY),
]


def run_of(state_dir: Path, **fields: Any) -> Run:
    """Return a run of three steps on the accelerator; `fields` are others of its fields."""
    values: dict[str, Any] = {"steps": 3, "device": kind(), "config": store_config(state_dir, "cpu")} | fields
    return Run(**values)


def engine_of(run: Run) -> trainer_client.Engine:
    model = build_model(run)
    optimizer, _ = make_optimizer(model, run)
    return trainer_client.initialize(model=model, optimizer=optimizer, config=run.config)[0]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_equals_plain_torch_to_rounding(model: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, model=model)
    assert_close(train_through_store(run), train_plain(run))


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_equals_plain_torch_to_rounding(checkpointing: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, model="conditional", checkpointing=checkpointing)
    assert_close(train_through_store(run), train_plain(run))


def test_parameters_of_two_dtypes_equal_a_hand_written_loop_to_rounding(tmp_path: Path) -> None:
    run = run_of(tmp_path, model="adapters", with_masters=True)
    assert_close(train_through_store(run), train_with_masters(run))


def test_autocast_equals_plain_torch_to_the_rounding_of_bf16(tmp_path: Path) -> None:
    run = run_of(tmp_path)

    def losses_of(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], object]) -> torch.Tensor:
        losses = []
        for tokens in micro_batches(run.steps):
            batch = tokens.to(kind())
            with torch.autocast(kind(), dtype=torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses)

    plain = build_model(run)
    expected = losses_of(plain, make_optimizer(plain, run)[0], torch.Tensor.backward)
    with engine_of(run) as engine:
        found = losses_of(engine, engine, engine.backward)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


def test_generate_gives_the_tokens_of_plain_torch(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    prompt = next(micro_batches(1)).to(kind())[:, :8]
    arguments: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain: Any = build_model(run)
    expected = plain.generate(prompt, **arguments)
    engine = engine_of(run)
    with engine:
        assert torch.equal(engine.generate(prompt, **arguments), expected)


def test_a_store_client_takes_tensors_of_the_device(tmp_path: Path) -> None:
    """The engine starts the daemon, whose address the client uses."""
    run = run_of(tmp_path)
    engine = engine_of(run)
    value = torch.randn(1000, 7, device=kind())
    with engine, trainer_client.StoreClientSync.connect(f"unix:{tmp_path}/paramserver.sock") as store:
        with store.open("tensors", {"value": value}) as job:
            job.put({"value": value})
            job.commit()
        with store.read("tensors") as reader:
            assert torch.equal(reader.get("value"), value.cpu())


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    # torch 2.11 itself looks at this attribute while it compiles.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    # It advises to round products in fp32, which this comparison must not do.
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available:UserWarning",
)
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
@ON_CUDA_ONLY
def test_compiled_units_equal_plain_torch_to_rounding(mode: str, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    expected = train_plain(replace(run, schedule=False))
    engine = engine_of(run)
    losses = []
    with engine:
        engine.compile(compile_kwargs={"mode": mode})
        for tokens in micro_batches(run.steps):
            batch = tokens.to(engine.device)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), rtol=1e-4, atol=0)
