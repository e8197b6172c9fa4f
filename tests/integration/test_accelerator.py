"""What `trainer_client.Accelerator` does besides training: saved states, weights, trackers and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from safetensors.torch import load_file
from torch import nn

import trainer_client
from trainer_client.errors import ConfigError

WIDTH = 8
OFFLOAD = {"device": "cpu"}
STAGE_3 = {"stage": 3, "offload_param": OFFLOAD, "offload_optimizer": OFFLOAD}


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps its state in its classes, for all Accelerators of a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1))


def make(store: str, config: dict[str, Any] | None = None, **arguments: Any) -> trainer_client.Accelerator:
    section = {"address": store, **(config or {}).pop("paramserver", {})}
    return trainer_client.Accelerator(
        config={"zero_optimization": STAGE_3, **(config or {}), "paramserver": section}, **arguments
    )


class Loop:
    """A training loop with a schedule, and with an object that is saved and loaded with the rest."""

    def __init__(self, accelerator: Any) -> None:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        self.accelerator = accelerator
        self.model, self.optimizer, self.schedule = accelerator.prepare(model, optimizer, schedule)
        self.step = 0
        accelerator.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def run(self, until: int) -> list[float]:
        losses = []
        while self.step < until:
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.step))
            loss = self.model(inputs).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses


def test_a_saved_state_goes_on_with_the_same_bits_in_another_run(model_store: str, tmp_path: Path) -> None:
    """The names count up, only two stay, and the run that loads has a job of its own."""
    named = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    first = Loop(make(model_store, project_config=named))
    for until in (1, 2, 3):
        first.run(until)
        first.accelerator.save_state()
    expected = first.run(6)
    assert first.accelerator.engine.global_steps == 6
    first.accelerator.end_training()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert not list(tmp_path.rglob("optimizer.bin")) + list(tmp_path.rglob("model.safetensors"))

    AcceleratorState._reset_state(reset_partial_state=True)
    again = Loop(make(model_store, project_config=named))
    again.run(1)
    again.accelerator.load_state()
    assert (again.step, again.accelerator.engine.global_steps) == (3, 3)
    assert again.run(6) == expected
    again.accelerator.load_state(str(tmp_path / "checkpoints/checkpoint_1"))
    assert again.run(6)[1:] == expected
    again.accelerator.end_training()


def test_plain_accelerate_trains_alike(model_store: str) -> None:
    """The one-rank loop of the other tests has the losses of Accelerate itself, bit for bit."""
    ours = Loop(make(model_store))
    torch.manual_seed(2)
    losses = ours.run(6)
    ours.accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)

    plain = Loop(accelerate.Accelerator(cpu=True))
    torch.manual_seed(2)
    assert plain.run(6) == losses


def test_a_script_that_is_started_again_begins_anew_unless_its_job_has_a_name(model_store: str, job: str) -> None:
    steps = []
    for section in ({}, {}, {"job": job}, {"job": job}):
        loop = Loop(make(model_store, {"paramserver": section}))
        torch.manual_seed(3)
        assert loop.optimizer.param_groups[0]["lr"] == 1e-2
        steps.append((loop.accelerator.engine.global_steps, loop.run(3)))
        assert loop.optimizer.param_groups[0]["lr"] == loop.schedule.get_last_lr()[0] == 5e-3
        loop.accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert steps[0] == steps[1] == steps[2]
    assert steps[3][0] == 3


def test_weights_are_saved_and_read_under_the_names_of_the_model(model_store: str, tmp_path: Path) -> None:
    loop = Loop(make(model_store))
    accelerator = loop.accelerator
    loop.run(2)
    weights = accelerator.get_state_dict(loop.model)
    accelerator.save_model(loop.model, str(tmp_path))
    inner = accelerator.unwrap_model(loop.model)

    assert isinstance(loop.model, trainer_client.Engine) and inner is loop.model.module
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == weights.keys() == build().state_dict().keys()
    assert [name for name, value in weights.items() if not torch.equal(saved[name], value)] == []
    assert accelerator.get_state_dict(loop.model, unwrap=False).keys() == {f"module.{name}" for name in weights}
    accelerator.end_training()


def test_a_hook_of_a_saved_state_gets_the_weights(model_store: str, tmp_path: Path) -> None:
    loop = Loop(make(model_store))
    loop.run(1)
    found: list[dict[str, torch.Tensor]] = []
    loop.accelerator.register_save_state_pre_hook(lambda *_: found.append(loop.accelerator.get_state_dict(loop.model)))

    loop.accelerator.save_state(str(tmp_path))

    expected = loop.accelerator.get_state_dict(loop.model)
    assert found[0].keys() == expected.keys() == build().state_dict().keys()
    assert all(torch.equal(found[0][name], value) for name, value in expected.items())
    assert not list(tmp_path.rglob("*.safetensors"))
    loop.accelerator.end_training()


class Recorder(GeneralTracker):  # type: ignore[misc]
    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.logged

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.logged.append("finished")


def test_trackers_are_those_of_accelerate(model_store: str) -> None:
    recorder = Recorder()
    accelerator = make(model_store, log_with=recorder)
    accelerator.init_trackers("project", config={"rate": 1})
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()

    assert recorder.logged == [{"rate": 1}, (3, {"loss": 0.5}), "finished"]


def test_the_optimizer_and_the_schedule_may_be_those_of_the_config(model_store: str) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "linear"},
        },
    }
    accelerator = make(model_store, config)
    model = build()
    placeholder = DummyOptim(model.parameters(), lr=0.4)
    model, optimizer, schedule = accelerator.prepare(
        model, placeholder, DummyScheduler(placeholder, warmup_num_steps=4)
    )
    rates = []
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, WIDTH)).sum())
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        assert not optimizer.step_was_skipped
    # DeepSpeed's schedules are one step behind torch's.
    assert rates == pytest.approx([0.0, 0.1, 0.2])
    accelerator.end_training()


def test_a_gradient_that_is_not_finite_skips_the_step_and_the_schedule(model_store: str) -> None:
    loop = Loop(make(model_store))
    loop.accelerator.backward(loop.model(torch.full((1, WIDTH), torch.inf)).sum())
    loop.optimizer.step()
    loop.schedule.step()

    assert loop.optimizer.step_was_skipped and loop.accelerator.optimizer_step_was_skipped
    assert loop.schedule.scheduler.last_epoch == 0
    loop.accelerator.end_training()


def test_what_is_not_trained_is_prepared_too_and_a_second_model_after_the_first(model_store: str) -> None:
    accelerator = make(model_store)
    teacher, criterion = accelerator.prepare(build().requires_grad_(False), nn.MSELoss())
    for _ in range(2):
        student = build()
        student, optimizer = accelerator.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1))
        assert accelerator.prepare(student, optimizer) == (student, optimizer)
        loss = criterion(student(torch.ones(1, WIDTH)), teacher(torch.ones(1, WIDTH)))
        accelerator.backward(loss)
        optimizer.step()
        assert accelerator.engine.global_steps == 1
        student, optimizer = accelerator.free_memory(student, optimizer)


def test_a_second_accelerator_has_the_precision_of_the_first(model_store: str) -> None:
    make(model_store, mixed_precision="bf16")

    assert make(model_store).mixed_precision == "bf16"


def test_a_model_may_be_compiled(model_store: str) -> None:
    accelerator = make(model_store, dynamo_backend="eager")
    model = build()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert accelerator.engine.module._compiled_call_impl is not None
    accelerator.end_training()


def test_wrong_uses_say_what_to_write(model_store: str) -> None:
    accelerator = make(model_store, gradient_accumulation_steps=2)
    alone = accelerator.prepare(build())
    with pytest.raises(RuntimeError, match=r"model, optimizer = accelerator\.prepare"):
        accelerator.backward(alone(torch.ones(1, WIDTH)).sum())
    with pytest.raises(ConfigError, match=r"model, optimizer = accelerator\.prepare"):
        accelerator.prepare_optimizer(torch.optim.SGD(alone.parameters(), lr=0.1))
    loop = Loop(accelerator)
    with accelerator.accumulate(loop.model):
        accelerator.backward(loop.model(torch.ones(1, WIDTH)).sum())
        with pytest.raises(RuntimeError, match=r"if accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
    with accelerator.accumulate(loop.model):
        accelerator.backward(loop.model(torch.ones(1, WIDTH)).sum())
        with pytest.raises(ConfigError, match=r"without 0.bias and 2 others.*pass model.parameters"):
            accelerator.clip_grad_norm_([next(iter(loop.model.parameters()))], 1.0)
        with pytest.raises(ConfigError, match="norm_type=1"):
            accelerator.clip_grad_norm_(loop.model.parameters(), 1.0, norm_type=1)
        accelerator.clip_grad_value_(loop.model.parameters(), 0.1)
        loop.optimizer.step()
    with pytest.raises(ConfigError, match="even_batches"), accelerator.join_uneven_inputs([], even_batches=False):
        pass
    accelerator.end_training()


def test_the_scripts_of_the_page_run(model_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMSERVER_ADDRESS", model_store)
    page = (Path(__file__).parents[2] / "docs/accelerate.md").read_text(encoding="utf-8")
    scripts = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    assert len(scripts) == 2
    for script in scripts:
        exec(script, {})
        AcceleratorState._reset_state(reset_partial_state=True)
