"""Engines of one process share its process group, which the last one leaves; a group of the script stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from trainer_client import comm
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError
from trainer_client.training.run.node_store import join_processes

SETTINGS = load_config({"train_micro_batch_size_per_gpu": 1, "paramserver": {"device": "cpu"}}, {})
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that no launcher has started, and that has no process group before and after."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    _leave()
    yield
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def join(required: bool | None = None) -> ExitStack:
    resources = ExitStack()
    assert join_processes(SETTINGS, required, 29500, resources)[0] == 0
    return resources


def test_the_last_of_several_engines_leaves_the_group() -> None:
    first, second = join(), join()
    assert dist.get_world_size() == 1

    first.close()
    assert dist.is_initialized()
    second.close()
    assert not dist.is_initialized()


def test_a_group_of_the_script_stays() -> None:
    comm.init_distributed()

    join().close()

    assert dist.is_initialized()


def test_a_group_that_the_script_has_left_is_left_once() -> None:
    first = join()
    dist.destroy_process_group()
    second = join()

    first.close()
    assert dist.is_initialized()
    second.close()
    assert not dist.is_initialized()


def test_a_caller_that_says_that_there_is_a_group_gets_none() -> None:
    join(required=False).close()

    assert not dist.is_initialized()


def test_one_of_several_processes_of_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")

    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS = 2, and RANK is not set"):
        join()
