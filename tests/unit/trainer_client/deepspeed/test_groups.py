"""Data parallelism is the only kind, so every other kind has one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer_client.deepspeed import groups
from trainer_client.errors import ConfigError, NotBuiltError


def test_the_data_is_split_among_all_ranks_and_nothing_else_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")

    assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (2, 3)
    assert (groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()) == (0, 1)
    assert groups._get_sequence_parallel_world_size() == 1
    with pytest.raises(NotBuiltError, match="sequence parallelism"):
        groups._get_sequence_parallel_group()


def test_groups_of_experts_are_refused() -> None:
    groups.initialize(ep_size=1)
    with pytest.raises(NotBuiltError, match=r"ep_size=2.*expert parallelism"):
        groups.initialize(ep_size=2)
    with pytest.raises(ConfigError, match="get_model_parallel_world_size"):
        groups.initialize(mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2))
