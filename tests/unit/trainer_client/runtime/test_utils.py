"""The helpers of scripts print the memory, seed all generators, and make directories."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer_client.runtime.utils import (
    empty_cache,
    ensure_directory_exists,
    move_to_device,
    see_memory_usage,
    set_random_seed,
)


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
