"""A run that goes on from a stored job says so in one line, with what differs and which side of it counts."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, StepLR
from torch.utils.data import Dataset

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.elastic_run import Part, launch, train_part
from tests.integration.support.equality import assert_equal
from tests.integration.support.two_models import stderr_of_script, train_here
from trainer_client.training.run import client_state

UNCHANGED = "Config, model and optimizer have not changed."


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {"host_budget": "48MiB", "nvme_budget": "256MiB"}
    with Daemon(tmp_path_factory.mktemp("store") / "state", config) as daemon:
        yield daemon


class Rows(Dataset[torch.Tensor]):
    """A data set of equal samples."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))


class Trainer:
    """Trains one job in this process, part after part, and keeps the line that each part has logged.

    Attributes:
        job: name of the job.
        address: address of its daemon.
        line: the line of the last part.
        optimizer: the optimizer of the last part.
    """

    def __init__(self, address: str, job: str, caplog: pytest.LogCaptureFixture) -> None:
        self.job = job
        self.address = address
        self._section = {"address": address, "job": job}
        self._caplog = caplog
        self.line = ""
        self.optimizer: torch.optim.Optimizer | None = None

    def train(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        model: nn.Module | None = None,
        steps: int = 1,
        **arguments: Any,
    ) -> None:
        """Train a part of `steps` steps; `arguments` are those of `initialize`."""
        changes = dict(config or {})
        section = self._section | changes.pop("paramserver", {})
        values = {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
            "gradient_clipping": 0.0,
        }
        if "optimizer" in arguments:
            del values["optimizer"]
        self._caplog.clear()
        with self._caplog.at_level(logging.WARNING):
            engine, self.optimizer, _, _ = trainer_client.initialize(
                model=model or build(), config=values | changes | {"paramserver": section}, **arguments
            )
            with engine:
                end = engine.global_steps + steps
                while engine.global_steps < end:
                    engine.backward(engine(torch.ones(4, 4)).square().mean())
                    engine.step()
        lines = [record.getMessage() for record in self._caplog.records]
        assert len(lines) == 1, lines
        self.line = lines[0]


@pytest.fixture
def trainer(daemon: Daemon, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Trainer:
    return Trainer(daemon.address, request.node.name, caplog)


def test_a_user_who_configured_no_logging_sees_one_line_about_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_here(monkeypatch, tmp_path, "8", "2") == 2

    assert re.fullmatch(
        rf"paramserver: job 'default' goes on from step 2, committed \d+ s ago, in the state directory "
        rf"{re.escape(str(tmp_path))}/paramserver-state\. Today's values count for: train_batch_size 4 \(stored: 2\); "
        r"train_micro_batch_size_per_gpu 4 \(stored: 2\)\.\n",
        stderr_of_script(tmp_path, "8", "1", '{"train_batch_size": 4}'),
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "0 s"), (42, "4[2-9] s"), (1800, "30 min"), (11_520, "3 h 12 min"), (100_000, "1 d 3 h")],
)
def test_the_age_of_the_commit_is_said(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, seconds: int, said: str
) -> None:
    encode = client_state.encode

    def encode_as_then(state: Mapping[str, Any]) -> bytes:
        return encode({key: value - seconds if key == "made_at" else value for key, value in state.items()})

    with monkeypatch.context() as patches:
        patches.setattr(client_state, "encode", encode_as_then)
        trainer.train()
    trainer.train()
    assert re.search(f"goes on from step 1, committed {said} ago", trainer.line)


def test_stored_hyper_parameters_count_and_every_resume_says_so(trainer: Trainer, daemon: Daemon) -> None:
    changed = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.8, 0.999], "weight_decay": 0.25}}}
    trainer.train()
    trainer.train()
    assert re.fullmatch(
        rf"paramserver: job '{trainer.job}' goes on from step 1, committed \d+ s ago, in the store at "
        rf"{re.escape(daemon.address)}\. {re.escape(UNCHANGED)}",
        trainer.line,
    )

    for _ in range(2):
        trainer.train(changed)
        assert (
            "The stored values count for: betas [0.9, 0.999] (today: [0.8, 0.999]); lr 0.01 (today: 0.5); "
            'weight_decay 0.01 (today: 0.25). To change these, write "hyper_parameters": "config" into the section '
            "paramserver, or set them in optimizer.param_groups after initialize()."
        ) in trainer.line
        assert "Today's" not in trainer.line
        assert trainer.optimizer is not None and trainer.optimizer.param_groups[0]["lr"] == 0.01

    trainer.train()
    assert trainer.line.endswith(UNCHANGED)


def rate_of(trainer: Trainer) -> float:
    assert trainer.optimizer is not None
    return float(trainer.optimizer.param_groups[0]["lr"])


def test_todays_hyper_parameters_count_where_the_config_says_so(trainer: Trainer) -> None:
    def train(rate: float, period: int, count_of: str) -> float:
        config = {
            "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
            "paramserver": {"hyper_parameters": count_of},
        }
        trainer.train(config, lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, period), steps=2)
        return rate_of(trainer)

    def cosine(rate: float, step: int, period: int) -> float:
        return rate * (1 + math.cos(math.pi * step / period)) / 2

    assert train(0.01, 100, "config") == pytest.approx(cosine(0.01, 2, 100))
    for steps in (4, 6):
        # The second start has nothing that differs from the first one, and goes on with the same settings.
        assert train(0.04, 50, "config") == pytest.approx(cosine(0.04, steps, 50))
    assert trainer.line.endswith(UNCHANGED)
    assert train(0.02, 80, "config") == pytest.approx(cosine(0.02, 8, 80))
    assert "Today's values count for: lr 0.02 (stored: 0.04); lr_scheduler T_max 80 (stored: 50)." in trainer.line
    assert train(0.5, 10, "stored") == pytest.approx(cosine(0.02, 10, 80))
    assert "The stored values count for: lr 0.02 (today: 0.5); lr_scheduler T_max 80 (today: 10)." in trainer.line


def test_the_updates_after_a_change_of_the_rate_are_those_of_the_stored_moments(trainer: Trainer) -> None:
    def plain() -> nn.Sequential:
        model = build()
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)
        for rate in (0.01, 0.01, 0.05, 0.05):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(torch.ones(4, 4)).square().mean().backward()
            optimizer.step()
        return model

    section = {"hyper_parameters": "config"}
    trainer.train({"paramserver": section}, steps=2)
    changed = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}}, "paramserver": section}
    trainer.train(changed, steps=2)
    with trainer_client.StoreClientSync.connect(trainer.address) as client, client.read(trainer.job) as reader:
        stored = {name: reader.get(name) for name in plain().state_dict()}
    assert_equal(stored, plain().state_dict())


def test_the_groups_that_differ_are_named_by_their_numbers(trainer: Trainer) -> None:
    def train(*rates: float) -> None:
        model = build()
        groups = [{"params": list(module.parameters()), "lr": rate} for module, rate in zip(model, rates, strict=True)]
        trainer.train(model=model, optimizer=AdamW(groups))

    train(0.1, 0.1, 0.1)
    train(0.2, 0.1, 0.2)
    assert "count for: lr of group 0, 2 0.1 (today: 0.2)." in trainer.line
    train(0.3, 0.3, 0.3)
    assert "count for: lr 0.1 (today: 0.3)." in trainer.line


def test_a_schedule_that_has_gone_on_is_no_difference_and_another_one_is(trainer: Trainer) -> None:
    def train(scheduler: Callable[[torch.optim.Optimizer], Any] | None, rate: float = 0.01) -> None:
        config = {"optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}}}
        trainer.train(config, lr_scheduler=scheduler, steps=2)

    train(lambda optimizer: CosineAnnealingLR(optimizer, 100))
    train(lambda optimizer: CosineAnnealingLR(optimizer, 100))
    assert trainer.line.endswith(UNCHANGED)
    for _ in range(2):
        train(lambda optimizer: CosineAnnealingLR(optimizer, 200), rate=0.03)
        assert (
            "The stored values count for: lr 0.01 (today: 0.03); lr_scheduler T_max 100 (today: 200)." in trainer.line
        )
    train(lambda optimizer: StepLR(optimizer, 5))
    assert (
        "Today's values count for: lr_scheduler StepLR, with the stored count of steps (stored: CosineAnnealingLR)."
    ) in trainer.line
    train(None)
    assert "no lr_scheduler (stored: StepLR), so the learning rates stay as they are" in trainer.line
    train(lambda optimizer: LambdaLR(optimizer, lambda step: 1.0), rate=0.5)
    assert "lr 0.5 (stored: 0.01); lr_scheduler LambdaLR, from its beginning (stored: none)" in trainer.line
    assert trainer.optimizer is not None and trainer.optimizer.param_groups[0]["lr"] == 0.5


def test_a_schedule_of_another_class_has_the_stored_count_and_the_rate_of_today(trainer: Trainer) -> None:
    def train(scheduler: Callable[[torch.optim.Optimizer], Any], rate: float) -> float:
        config = {"optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}}}
        trainer.train(config, lr_scheduler=scheduler, steps=2)
        return rate_of(trainer)

    assert train(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), 0.01) == 0.01 * 0.5**2

    # StepLR has a `gamma`, too, and no functions.
    assert train(lambda optimizer: ExponentialLR(optimizer, gamma=0.9), 0.02) == pytest.approx(0.02 * 0.9**4)
    assert "lr 0.02 (stored: 0.01); lr_scheduler ExponentialLR, with the stored count of steps" in trainer.line
    assert train(lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / step if step else 1.0), 0.02) == 0.02 * (
        1 / 6
    )
    assert (
        "Today's values count for: lr_scheduler LambdaLR, with the stored count of steps (stored: ExponentialLR)."
        in trainer.line
    )


def test_a_schedule_that_was_not_there_sets_the_first_rate(trainer: Trainer) -> None:
    trainer.train(steps=2)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.04, "weight_decay": 0.01}}}
    trainer.train(config, lr_scheduler=lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    assert rate_of(trainer) == 0.04
    trainer.train(config, lr_scheduler=lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    assert (rate_of(trainer), UNCHANGED in trainer.line) == (0.02, True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": 8}, "train_batch_size 8 (stored: 4); train_micro_batch_size_per_gpu 8 (stored: 4)"),
        (
            {"train_batch_size": 4, "gradient_accumulation_steps": 2},
            "train_micro_batch_size_per_gpu 2 (stored: 4); gradient_accumulation_steps 2 (stored: 1)",
        ),
        ({"bf16": {"enabled": True}}, "precision bfloat16 (stored: float32)"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5 (stored: 0.0)"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            'zero_optimization.stage 3 (stored: 0); zero_optimization.offload_param {"device": "cpu"} (stored: null)',
        ),
        (
            {"paramserver": {"units": {"classes": ["Linear"]}}},
            "units 3 from '0' to '2' (stored: the whole model)",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.01, "adam_w_mode": False}}},
            "optimizer Adam (stored: AdamW)",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}}},
            "optimizer SGD (stored: AdamW); the optimizer states of 6 parameters, which begin at zero",
        ),
    ],
)
def test_what_is_as_todays_config_has_it(trainer: Trainer, config: dict[str, Any], said: str) -> None:
    trainer.train()
    trainer.train(config)
    assert trainer.line.endswith(f"Today's values count for: {said}.") and "The stored" not in trainer.line
    trainer.train(config)
    assert trainer.line.endswith(UNCHANGED)


def test_frozen_and_thawed_parameters_are_named(trainer: Trainer) -> None:
    frozen = build()
    frozen[1].requires_grad_(False)
    trainer.train(model=frozen)
    other = build()
    other[0].bias.requires_grad_(False)

    trainer.train({"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.01}}}, model=other)

    assert (
        "Today's values count for: the optimizer states of 2 parameters, which begin at zero; lr 0.5 (stored: 0.01); "
        "1.weight, 1.bias trained (stored: frozen); 0.bias frozen (stored: trained)."
    ) in trainer.line


def test_adam_and_adamw_are_told_apart_also_where_their_class_is_one(trainer: Trainer) -> None:
    model = build()
    trainer.train(model=model, optimizer=Adam(model.parameters(), lr=0.01))
    model = build()
    decoupled = Adam(model.parameters(), lr=0.01, decoupled_weight_decay=True)
    trainer.train(model=model, optimizer=decoupled)
    assert trainer.line.endswith("Today's values count for: decoupled_weight_decay True (stored: False).")
    model = build()
    trainer.train(model=model, optimizer=SGD(model.parameters(), lr=0.01))
    assert "optimizer SGD (stored: Adam)" in trainer.line


def test_other_training_data_are_named(trainer: Trainer) -> None:
    trainer.train(training_data=Rows(40))
    trainer.train({"paramserver": {"data": {"seed": 3, "shuffle": False}}}, training_data=Rows(60))
    assert trainer.line.endswith(
        "samples of training_data 60 (stored: 40); data.seed 3 (stored: 0); data.shuffle False (stored: True)."
    )
    trainer.train()
    assert "no training_data (stored: a place in it, which the next commit will not have)" in trainer.line
    trainer.train(training_data=Rows(40))
    assert "training_data, from the first sample (stored: none)" in trainer.line


def test_buffers_that_no_commit_has_are_named(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Sequential:
        built = build()
        built.register_buffer("table", torch.zeros(128 << 10))
        built.register_buffer("count", torch.zeros(1))
        return built

    with monkeypatch.context() as patch:
        # A release before this one has committed small buffers only.
        patch.setattr("trainer_client.training.run.job.can_store", lambda _: False)
        trainer.train(model=model())

    trainer.train(model=model())
    assert "Today's values count for: table, buffers that the step does not have." in trainer.line
    trainer.train(model=model())
    assert "table" not in trainer.line


def test_a_dynamic_loss_scale_goes_on_and_one_of_a_run_in_fp32_does_not(trainer: Trainer) -> None:
    def fp16(**section: float) -> dict[str, Any]:
        return {"fp16": {"enabled": True, **section}}

    trainer.train()
    trainer.train(fp16(initial_scale_power=4, loss_scale_window=1))
    assert "precision float16 (stored: float32)" in trainer.line and "the loss scale" not in trainer.line
    trainer.train(fp16(initial_scale_power=9, loss_scale_window=1))
    assert trainer.line.endswith("The stored values count for: the loss scale 16.0 (today: 2 ** 9).")


def test_another_number_of_ranks_is_named(tmp_path: Path, daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    launch([Part(job="ranks", until=1, addresses=(daemon.address,))], 2, tmp_path)

    with caplog.at_level(logging.WARNING):
        train_part(Part(job="ranks", until=2, addresses=(daemon.address,)))

    (line,) = (message for message in caplog.messages if message.startswith("paramserver:"))
    assert line.endswith(
        "Today's values count for: train_micro_batch_size_per_gpu 12 (stored: 6); ranks 1 (stored: 2)."
    )


def test_a_commit_of_an_earlier_version_is_gone_on_with(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = client_state.encode

    def encode_as_before(state: Mapping[str, Any]) -> bytes:
        return encode({key: value for key, value in state.items() if key not in ("made_at", "made_with")})

    def schedule(optimizer: torch.optim.Optimizer) -> StepLR:
        return StepLR(optimizer, 1)

    with monkeypatch.context() as patches:
        patches.setattr(client_state, "encode", encode_as_before)
        trainer.train(lr_scheduler=schedule)
    params = {"lr": 0.5, "eps": 0.25, "weight_decay": 0.01}
    changed = {"optimizer": {"type": "AdamW", "params": params}, "train_batch_size": 8}

    trainer.train(changed, lr_scheduler=schedule)

    assert "goes on from step 1, in the store" in trainer.line
    assert "count for: eps 1e-08 (today: 0.25); lr 0.01 (today: 0.5)." in trainer.line
    assert "count for: train_batch_size 8 (stored: 4)." in trainer.line
    assert trainer.line.endswith("An earlier version made this commit and noted less, so more may have changed.")
    assert trainer.optimizer is not None and trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.1**2)
    trainer.train(changed, lr_scheduler=schedule)
    assert "count for: eps 1e-08 (today: 0.25); lr 0.01 (today: 0.5)." in trainer.line
    assert "An earlier version" not in trainer.line and "Today's" not in trainer.line
