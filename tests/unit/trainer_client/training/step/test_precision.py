"""The loss scale follows DeepSpeed's rules; inputs are cast and nothing else."""

from __future__ import annotations

import pytest
import torch

from trainer_client.config.precision import Fp16Section
from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.step.precision import LossScaler, cast_floating_inputs


def scaler(**changes: object) -> LossScaler:
    section = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 2, **changes}
    return LossScaler(Fp16Section.model_validate(section))


def test_without_fp16_the_scale_is_one() -> None:
    disabled = LossScaler(Fp16Section())
    disabled.update(overflow=True)

    assert disabled.scale == 1.0


def test_the_first_overflow_uses_the_patience_and_the_second_halves() -> None:
    dynamic = scaler()
    scales = []
    for _ in range(3):
        dynamic.update(overflow=True)
        scales.append(dynamic.scale)

    assert scales == [16.0, 8.0, 4.0]


def test_a_window_of_good_steps_doubles_and_restores_the_patience() -> None:
    dynamic = scaler()
    dynamic.update(overflow=True)
    for _ in range(4):
        dynamic.update(overflow=False)
    assert dynamic.scale == 32.0

    dynamic.update(overflow=True)
    assert dynamic.scale == 32.0


@pytest.mark.parametrize(
    ("overflows", "doublings"),
    [
        ("......", [3, 5]),
        ("x......", [4, 6]),
        (".x....x...", [5, 10]),
        ("..x.x...", [8]),
    ],
)
def test_the_first_good_step_does_not_count_for_the_window(overflows: str, doublings: list[int]) -> None:
    """The steps, counted from 1, are those at which the scale of DeepSpeed 0.19.6 doubles with a window of 2."""
    dynamic = scaler(loss_scale_window=2)
    found = []
    for step, character in enumerate(overflows, start=1):
        before = dynamic.scale
        dynamic.update(overflow=character == "x")
        found += [step] if dynamic.scale > before else []

    assert found == doublings


def test_under_autocast_the_scale_is_that_of_torch() -> None:
    section = {"enabled": True, "dtype": "fp16"}
    config = TrainingConfig.model_validate({"train_batch_size": 1, "torch_autocast": section})
    ours, theirs = LossScaler.of(config), torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(4010):
        weight.grad = torch.full((1,), torch.inf if step == 5 else 0.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow=step == 5)

        assert ours.scale == theirs.get_scale(), step

    assert ours.scale == 2.0**17


def test_a_good_step_restores_the_patience_if_only_overflows_in_a_row_count() -> None:
    dynamic = scaler(consecutive_hysteresis=True)
    scales = []
    for overflow in (True, False, True, True):
        dynamic.update(overflow=overflow)
        scales.append(dynamic.scale)

    assert scales == [16.0, 16.0, 16.0, 8.0]


def test_the_scale_has_a_floor() -> None:
    dynamic = scaler(hysteresis=1, min_loss_scale=8)
    for _ in range(5):
        dynamic.update(overflow=True)

    assert dynamic.scale == 8.0


def test_a_static_scale_never_changes() -> None:
    static = scaler(loss_scale=128)
    static.update(overflow=True)
    static.load_state_dict({"scale": 2.0, "patience": 1, "good_steps": 0})

    assert static.scale == 128.0


def test_a_dynamic_scale_begins_anew_after_a_run_without_one() -> None:
    for other in (LossScaler(Fp16Section()), scaler(loss_scale=128)):
        dynamic = scaler()
        began = dynamic.state_dict()
        dynamic.load_state_dict(other.state_dict())
        assert dynamic.state_dict() == began


def test_a_restored_scaler_goes_on_as_the_saved_one() -> None:
    saved, restored = scaler(), scaler()
    saved.update(overflow=True)
    saved.update(overflow=False)
    restored.load_state_dict(saved.state_dict())
    for overflow in (False, False, True, True, False):
        saved.update(overflow=overflow)
        restored.update(overflow=overflow)

        assert restored.state_dict() == saved.state_dict()


def test_only_floating_tensors_of_a_tree_are_cast() -> None:
    ids, mask = torch.arange(3), torch.ones(2, dtype=torch.bool)
    tree = {"x": [torch.ones(2), 1.5], "ids": ids, "more": (mask, None)}

    cast = cast_floating_inputs(tree, torch.bfloat16)

    assert cast["x"][0].dtype == torch.bfloat16
    assert cast["x"][1] == 1.5
    assert cast["ids"] is ids
    assert cast["more"][0] is mask
