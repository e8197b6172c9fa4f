"""The model that an engine for inference takes, and the source of its weights and buffers, where processes differ."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import run_ranks
from tests.integration.support.waiting import wait_until
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.types import TensorSpec
from trainer_client.errors import ConfigError

INPUTS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
# A commit has at most 256 KiB of buffers.
LARGE = (256 << 10) // 4 + 1


class Shifted(nn.Module):
    """A layer with a buffer that its state dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.register_buffer("shift", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.shift.copy_(torch.arange(8.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight + self.shift


def model_of(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), Shifted(), nn.Linear(8, 2))


def config_for(address: str, job: str, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "paramserver": {"address": address, "job": job} | section,
    }


def opened(model: nn.Module, config: dict[str, Any], **arguments: Any) -> trainer_client.InferenceEngine:
    engine: Any = trainer_client.initialize(model=model, config=config, **arguments)[0]
    assert isinstance(engine, trainer_client.InferenceEngine)
    return engine


def output_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(INPUTS)
    return output


def test_a_model_has_one_engine_at_a_time(model_store: str, job: str) -> None:
    model = model_of()
    one, two = f"{job}-one", f"{job}-two"
    inference = {"host_bytes": 0}
    with opened(model, config_for(model_store, one, inference=inference)):
        for config in (
            config_for(model_store, two),
            config_for(model_store, two) | {"zero_optimization": {"stage": 1}},
        ):
            with pytest.raises(ConfigError, match="belongs to an open engine for inference"):
                trainer_client.initialize(model=model, config=config)
        with pytest.raises(ConfigError, match="belongs to an open engine for inference"):
            trainer_client.initialize(
                model=model,
                config=config_for(model_store, two) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
            )
        with pytest.raises(ConfigError, match="one engine at a time"):
            trainer_client.init_inference(model, paramserver={"address": model_store, "job": two})
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    trainer_client.initialize(model=model_of(2), config=config_for(model_store, f"{two}.trained") | optimizer)[
        0
    ].close()
    two = f"{two}.trained"
    # After the end of its engine a model may have the weights of another job, or of a later step.
    with opened(model, config_for(model_store, two)) as engine:
        expected = model_of(2)
        assert torch.equal(output_of(engine), output_of(expected))
        for state in (engine.full_state_dict(), model.state_dict()):
            assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


def values_of(engine: trainer_client.InferenceEngine) -> list[bytes]:
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


def test_a_config_without_a_job_gives_a_model_no_weights_but_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One config, without and with an optimizer, evaluates some models before and after the training of one of them."""
    expected = {seed: [value.numpy().tobytes() for value in model_of(seed).state_dict().values()] for seed in (1, 2, 3)}
    save_file(model_of(3).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = [model_of(), model_of()]
    with trainer_client.zero.Init(seed=1):
        recorded = model_of()
    with Daemon(tmp_path / "state") as daemon:
        config = config_for(daemon.address, "default")
        del config["paramserver"]["job"]
        with opened(model_of(1), config) as engine:
            assert values_of(engine) == expected[1]
            before = engine.job
        optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        with trainer_client.initialize(model=model_of(1), config=config | optimizer)[0] as trainer:
            for _ in range(2):
                trainer.backward(trainer(INPUTS).square().mean())
                trainer.step()
            trained = [value.numpy().tobytes() for value in trainer.full_state_dict().values()]
        assert trained not in expected.values()

        jobs = []
        for seed in (1, 2):
            with opened(model_of(seed), config) as engine:
                assert (values_of(engine), engine.step_number) == (expected[seed], 0)
                jobs.append(engine.job)
        assert jobs[0] == before != jobs[1]
        for path in (tmp_path, tmp_path / "model.safetensors"):
            with opened(model_of(1), config, weights=path) as engine:
                assert values_of(engine) == expected[3]
        # A user who names the job, or whose model has no values, gets the trained weights.
        named = config_for(daemon.address, "default")
        for model, keys in ((model_of(1), named), (empty[0], config), (recorded, config)):
            with opened(model, keys) as engine:
                assert (values_of(engine), engine.job, engine.step_number) == (trained, "default", 2)
        # A model of zero.Init might have had values of its own.
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len([text for text in warnings if "if the store has job 'default', the model gets its" in text]) == 1
        with opened(empty[1], config, weights=tmp_path) as engine:
            assert values_of(engine) == expected[3]


def test_a_model_of_which_some_parameters_have_values_keeps_them(model_store: str) -> None:
    config = config_for(model_store, "")
    del config["paramserver"]["job"]
    jobs = []
    for seed in (6, 7):
        with trainer_client.zero.Init(seed=1):
            model = model_of(1)
        model[2] = nn.Linear(8, 2)
        nn.init.constant_(model[2].weight, seed)
        nn.init.zeros_(model[2].bias)
        with opened(model, config) as engine:
            state = engine.full_state_dict()
            assert torch.equal(state["2.weight"], torch.full((2, 8), float(seed)))
            jobs.append((engine.job, state["0.weight"].numpy().tobytes()))
    assert jobs[0][0] != jobs[1][0] and jobs[0][1] == jobs[1][1]

    with torch.device("meta"):
        model = model_of()
    model[2] = nn.Linear(8, 2)
    with pytest.raises(ConfigError, match=r"0\.weight is on the meta device, and others have values.*paramserver\.job"):
        opened(model, config)
    with pytest.raises(ConfigError, match=r"inference\.step is 3, .*write paramserver\.job"):
        opened(model_of(), config | {"paramserver": {"address": model_store, "inference": {"step": 3}}})
    model = model_of()
    opened(model, config).close()
    with pytest.raises(ConfigError, match=r"has no values, .* is closed: name the stored job"):
        opened(model, config)


def test_ranks_with_other_values_get_those_of_rank_0(model_store: str) -> None:
    run_ranks("tests.integration.support.unlike_models", 2, model_store)


def test_a_process_that_a_launcher_has_numbered_puts_the_model_into_the_store(
    model_store: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with trainer_client.init_inference(model_of(3), paramserver={"address": model_store, "job": job}) as engine:
        assert torch.equal(output_of(engine), output_of(model_of(3)))


def test_a_process_goes_on_where_another_one_has_ended_without_a_commit(
    model_store: str, job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save_file(model_of().state_dict(), tmp_path / "model.safetensors")
    specs = {"weight": TensorSpec(shape=(4,), dtype=torch.float32)}
    outputs: list[torch.Tensor] = []

    def run() -> None:
        with opened(model_of(), config_for(model_store, job), weights=tmp_path) as engine:
            outputs.append(output_of(engine))

    with StoreClientSync.connect(model_store) as client:
        writer = client.open(job, specs)
        waiting = threading.Thread(target=run, daemon=True)
        waiting.start()
        wait_until(lambda: f"another process is putting job '{job}'" in caplog.text)
        writer.close()
        waiting.join(30)
        assert not waiting.is_alive()
        (output,) = outputs
        assert torch.equal(output, output_of(model_of()))


def test_values_that_files_lack_make_another_job(model_store: str, tmp_path: Path) -> None:
    state = model_of().state_dict()
    save_file({name: value for name, value in state.items() if name.startswith("0.")}, tmp_path / "model.safetensors")
    jobs = set()
    for seed in (4, 5, 4):
        model = trainer_client.load_checkpoint_and_dispatch(
            model_of(seed), tmp_path, paramserver={"address": model_store}
        )
        expected = model_of(seed)
        expected.load_state_dict(state | expected.state_dict() | {n: v for n, v in state.items() if n[0] == "0"})
        assert torch.equal(output_of(model), output_of(expected))
        jobs.add(model.paramserver_engine.job)
        model.paramserver_engine.close()
    assert len(jobs) == 2


def test_a_buffer_on_the_meta_device_is_made_by_its_module(model_store: str, job: str) -> None:
    state = model_of().state_dict()
    for _ in range(2):
        with torch.device("meta"):
            model = model_of()
        # The parameters have values afterwards, and the buffer has none, because the state does not have it.
        model.load_state_dict(state, assign=True)
        with opened(model, config_for(model_store, job)) as engine:
            assert torch.equal(output_of(engine), output_of(model_of()))


def test_a_buffer_on_the_meta_device_has_the_value_in_the_files(model_store: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        # No function of the model sets this buffer.
        model[0].register_buffer("scale", torch.full((2,), 7.0))
        return model

    torch.manual_seed(1)
    full = build()
    save_file(full.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = build()
    trainer_client.load_checkpoint_and_dispatch(model, tmp_path, paramserver={"address": model_store})
    assert torch.equal(model[0].scale, full[0].scale)
    assert torch.equal(output_of(model), output_of(full))
    model.paramserver_engine.close()


class Scaled(nn.Linear):
    """A layer whose scale is an extra state, as in layers of quantizing libraries."""

    scale = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.scale)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = float(state)


def test_extra_states_are_those_that_the_trainer_has_committed(model_store: str, job: str) -> None:
    trained, model = nn.Sequential(Scaled(8, 2)), nn.Sequential(Scaled(8, 2))
    trained.load_state_dict(trained.state_dict() | {"0._extra_state": torch.tensor(3.0)})
    full = output_of(trained)
    config = config_for(model_store, job) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    trainer_client.initialize(model=trained, config=config)[0].close()
    with opened(model, config_for(model_store, job)) as engine:
        assert torch.equal(output_of(engine), full)


def test_buffers_that_a_commit_does_not_have_are_named(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_buffers(sizes: dict[str, int]) -> nn.Module:
        model = model_of()
        for name, size in sizes.items():
            model[1].register_buffer(name, torch.zeros(size))
        return model

    config = config_for(model_store, job) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    sizes = {"changed": 3, "large": LARGE}
    with monkeypatch.context() as patch:
        # A release before this one has committed small buffers only.
        patch.setattr("trainer_client.training.run.job.can_store", lambda _: False)
        trainer_client.initialize(model=with_buffers(sizes), config=config)[0].close()
    with opened(with_buffers(sizes | {"changed": 4}), config_for(model_store, job)):
        assert "the stored buffer '1.changed' of shape [3] is not in this model" in caplog.text
        assert "no values of 1 buffers of its state dict (1.large)" in caplog.text
