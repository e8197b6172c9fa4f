"""The library's own code is measured by real steps of a small job, which leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramserver.contract.durability import durable_every_steps, parse_durability
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError
from trainer_client.plan.overhead import probe_overhead, small_config


def test_a_small_job_shows_the_overhead_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The address of an operator's daemon, which trainers and the admin tool get, is not for the small job.
    monkeypatch.setenv("PARAMSERVER_ADDRESS", f"unix:{tmp_path}/of-an-operator.sock")
    config = small_config(stage=3, homes=("host", "nvme"), dtype=torch.bfloat16, durability="step")

    found = probe_overhead(config, dtype=torch.bfloat16, ranks=1, threads=1, directory=tmp_path / "state")

    # On a busy machine the two jobs may differ by nothing.
    assert found.per_unit >= 0
    assert found.per_step >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = small_config(stage=0, homes=("device", "device"), dtype=None, durability="step")

    with pytest.raises(ConfigError, match=r"--dir .*file/state cannot be probed"):
        probe_overhead(config, dtype=None, ranks=1, threads=1, directory=tmp_path / "file" / "state")


@pytest.mark.parametrize("durability", ["step", "snapshot:3", "none", "replicated"])
def test_a_small_job_has_a_config_that_training_accepts(durability: str) -> None:
    config = small_config(stage=2, homes=("device", "host"), dtype=None, durability=durability)

    assert load_config(config, {}).paramserver.durable_every == durable_every_steps(parse_durability(durability))
