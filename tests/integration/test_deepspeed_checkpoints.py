"""What scripts for DeepSpeed do with a checkpoint beside loading it: convert it, and take its fp32 weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.integration.support.checkpoint_ranks import SAVED_AT, Net, batch, config_of, start, steps
from trainer_client import zero
from trainer_client.checkpoint import UNIVERSAL_CHECKPOINT_INFO, ds_to_universal
from trainer_client.errors import CheckpointError, ConfigError, ExportError
from trainer_client.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)


def test_a_converted_checkpoint_is_loaded_as_the_original(model_store: str, job: str, tmp_path: Path) -> None:
    tag = f"global_step{SAVED_AT}"
    with start(config_of(model_store, job)) as engine:
        list(steps(engine, SAVED_AT))
        engine.save_checkpoint(tmp_path, client_state={UNIVERSAL_CHECKPOINT_INFO: {}})
        saved = engine.full_state_dict()
    universal = config_of(model_store, f"{job}-new") | {"checkpoint": {"load_universal": True}}
    with start(universal) as engine:
        with pytest.raises(CheckpointError, match=r"no file .*latest_universal.*ds_to_universal"):
            engine.load_checkpoint(tmp_path)
        arguments = ["--input_folder", str(tmp_path / tag), "--output_folder", str(tmp_path / f"{tag}_universal")]
        ds_to_universal.main(ds_to_universal.parse_arguments([*arguments, "--inject_missing_state"]))
        path, state = engine.load_checkpoint(tmp_path)
        assert path is not None and f"{tag}_universal" in path and state == {UNIVERSAL_CHECKPOINT_INFO: {}}
        assert all(torch.equal(value, saved[name]) for name, value in engine.full_state_dict().items())
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        ds_to_universal.main(SimpleNamespace(input_folder=tmp_path / "none", output_folder=tmp_path / "out"))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loaded_model_leaves_its_engine_and_is_a_plain_one(
    model_store: str, job: str, tmp_path: Path, stage: int
) -> None:
    """Scripts load the weights into the engine's own model after training, at stage 3 within GatheredParameters."""
    config = config_of(model_store, job, half=True) | {"zero_optimization": {"stage": stage}}
    inputs = batch(9).bfloat16()
    engine = start(config)
    list(steps(engine, SAVED_AT))
    engine.save_checkpoint(tmp_path)
    expected = {name: value.bfloat16() for name, value in engine.full_state_dict().items()}
    with zero.GatheredParameters(engine.module.parameters(), enabled=stage == 3):
        model = load_state_dict_from_zero_checkpoint(engine.module, tmp_path)
    for refused in (lambda: engine(inputs), engine.step, lambda: engine.save_checkpoint(tmp_path)):
        with pytest.raises(RuntimeError, match=r"call initialize\(\) to train on"):
            refused()
    assert model is engine.module
    engine.destroy()

    assert all(torch.equal(value.bfloat16(), expected[name]) for name, value in model.state_dict().items())
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    plain = Net()
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    plain.load_state_dict(model.state_dict())
    for each in (model.eval(), plain.eval()):
        each(inputs).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad)
    model.load_state_dict(plain.state_dict())
    model.seen.zero_()
    with start(config_of(model_store, f"{job}-again") | {"bf16": {"enabled": True}}, model) as again:
        loss = again.eval()(inputs)
        plain.seen.zero_()
        assert torch.equal(loss, plain(inputs))


def test_a_checkpoint_that_lacks_parameters_leaves_the_model_in_its_engine(
    model_store: str, job: str, tmp_path: Path
) -> None:
    """The parameters of a model that leaves its engine are uninitialised until they are loaded."""

    def model_with(**shapes: int) -> Net:
        model = Net()
        for name, size in shapes.items():
            model.register_parameter(name, torch.nn.Parameter(torch.ones(size)))
        return model

    with start(config_of(model_store, job), model_with(wider=2)) as engine:
        list(steps(engine, 1))
        engine.save_checkpoint(tmp_path)
        saved = engine.full_state_dict()
    with start(config_of(model_store, f"{job}-other"), model_with(wider=3, new=1)) as engine:
        before = engine.full_state_dict()
        with pytest.raises(RuntimeError, match=r"has no values, or none of the shape, of wider, new, and a model"):
            load_state_dict_from_zero_checkpoint(engine, tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        list(steps(engine, 1))
    # A plain model has values of its own.
    model = load_state_dict_from_zero_checkpoint(model_with(new=1), tmp_path)
    assert model.get_parameter("new").item() == 1
    assert torch.equal(model.get_parameter("first.weight"), saved["first.weight"])


def test_a_checkpoint_gives_its_fp32_weights_without_an_engine(model_store: str, job: str, tmp_path: Path) -> None:
    with start(config_of(model_store, job, half=True)) as engine:
        list(steps(engine, SAVED_AT))
        engine.save_checkpoint(tmp_path / "saved")
        expected = engine.full_state_dict()
        found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    # The job has ended, and its daemon still keeps the step.
    trained = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    assert expected.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    model = load_state_dict_from_zero_checkpoint(Net(), tmp_path / "saved", tag=f"global_step{SAVED_AT}")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "one", max_shard_size="1GB")
    written = torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True)
    assert written.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in written.items())
    with pytest.raises(ExportError, match="one"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "one")
    with pytest.raises(ConfigError, match="max_shard_size = 'much'"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "two", max_shard_size="much")
    with pytest.raises(CheckpointError, match=r"no file .*latest"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
