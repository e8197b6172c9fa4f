"""Groups and model-parallel units that an argument names are accepted if they split nothing but the data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer_client import comm
from trainer_client.errors import ConfigError
from trainer_client.training.data_parallel import check_group, check_mpu


def test_a_group_of_all_ranks_is_accepted_and_another_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "get_world_size", lambda group=None: 4 if group is None else group.size)

    check_group("f(group=...)", None)
    check_group("f(group=...)", SimpleNamespace(size=4))
    with pytest.raises(ConfigError, match=r"f\(group=\.\.\.\) has 2 of the 4 ranks"):
        check_group("f(group=...)", SimpleNamespace(size=2))


def test_an_mpu_that_splits_the_model_is_refused() -> None:
    check_mpu("f(mpu=...)", None)
    check_mpu("f(mpu=...)", SimpleNamespace(get_model_parallel_world_size=lambda: 1))
    with pytest.raises(ConfigError, match=r"f\(mpu=\.\.\.\): get_tensor_model_parallel_world_size\(\) is 2"):
        check_mpu("f(mpu=...)", SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2))
