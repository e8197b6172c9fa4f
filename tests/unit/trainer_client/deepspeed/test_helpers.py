"""The helpers of scripts: options, loaders, contexts, memory, generators, directories, and the version of torch."""

from __future__ import annotations

import argparse
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainer_client.deepspeed.helpers import (
    OnDevice,
    RepeatingLoader,
    add_config_arguments,
    empty_cache,
    ensure_directory_exists,
    move_to_device,
    recursive_getattr,
    recursive_setattr,
    required_torch_version,
    see_memory_usage,
    set_random_seed,
)


def test_a_parser_gets_the_options_of_deepspeed() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)

    args = add_config_arguments(parser).parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--local_rank=1"])

    assert (args.deepspeed, args.deepspeed_config, args.local_rank) == (True, "ds.json", 1)
    assert (args.deepscale, args.deepscale_config) == (False, None)
    assert add_config_arguments(argparse.ArgumentParser()).parse_args([]).deepspeed is False


def test_the_old_names_of_options_work_and_are_not_in_the_help() -> None:
    parser = add_config_arguments(argparse.ArgumentParser())

    assert parser.parse_args(["--deepscale", "--deepscale_config", "old.json"]).deepscale_config == "old.json"
    assert "deepscale" not in parser.format_help()
    assert "--deepspeed_config" in parser.format_help()


def test_a_repeating_loader_begins_again_at_the_end() -> None:
    assert list(islice(RepeatingLoader([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_an_empty_repeating_loader_ends() -> None:
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


def test_modules_are_made_on_the_device_in_the_dtype_of_on_device() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(2, 2)
        named = torch.zeros(2, dtype=torch.float32, device="cpu")

    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert (named.device.type, named.dtype) == ("cpu", torch.float32)
    assert (nn.Linear(2, 2).weight.device.type, nn.Linear(2, 2).weight.dtype) == ("cpu", torch.float32)


def test_on_device_can_be_disabled_and_ends_after_an_error() -> None:
    with OnDevice(dtype=torch.half, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    with pytest.raises(ZeroDivisionError), OnDevice(dtype=torch.half, device="meta"):
        raise ZeroDivisionError
    assert nn.Linear(2, 2).weight.dtype == torch.float32


def test_versions_are_compared_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.13.0"))

    assert required_torch_version(min_version="2.9") and required_torch_version(min_version=2.1, max_version="3.0")
    assert not required_torch_version(min_version="2.14") and not required_torch_version(max_version="2.9")
    with pytest.raises(ValueError, match="min_version or max_version"):
        required_torch_version()


def test_memory_is_printed_if_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("quiet")
    assert capsys.readouterr().out == ""

    see_memory_usage("after the model", force=True)
    empty_cache()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "after the model"
    assert "allocated" in lines[1]
    assert lines[2].startswith("machine: ")


def test_one_seed_sets_all_generators() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        drawn = []
        for _ in range(2):
            set_random_seed(3)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert drawn[0] == drawn[1]
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def test_the_directory_of_a_file_is_made(tmp_path: Path) -> None:
    ensure_directory_exists(tmp_path / "a" / "b" / "file.txt")

    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_tensors_in_containers_are_moved() -> None:
    kept, other = torch.ones(2), torch.ones(3)

    moved = move_to_device({"a": [other], "b": (other,)}, "meta")
    same = move_to_device([kept], "cpu", lambda item: item is kept)

    assert (moved["a"][0].device.type, moved["b"][0].device.type, other.device.type) == ("meta", "meta", "cpu")
    assert same[0] is kept


def test_attributes_are_found_and_set_by_their_path() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    other = nn.Linear(2, 3)

    recursive_setattr(model, "0.0", other)

    assert recursive_getattr(model, "0.0.weight") is other.weight
    with pytest.raises(AttributeError, match="missing"):
        recursive_setattr(model, "0.missing.weight", other)
