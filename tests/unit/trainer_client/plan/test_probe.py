"""The probe measures in the directory that it is given, leaves nothing there, and says where it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer_client.errors import ConfigError
from trainer_client.plan.probe import Task, measure, probe
from trainer_client.plan.real_pass import RealPass
from trainer_client.plan.store_probe import StoreUpdate, arena_like, probe_directory, update_limit

MIB = 1 << 20


def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()

    for directory in (tmp_path / "new" / "state", tmp_path / "there"):
        assert all(rate > 0 for rate in probe_directory(directory, file_bytes=8 * MIB))

    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"--dir .*file/state cannot be probed"):
        probe_directory(tmp_path / "file" / "state")


def test_known_rates_of_nvme_are_not_measured() -> None:
    rates, seconds = probe({}, ranks=1, threads=1, directory=None, device="cpu")

    assert (rates.nvme_read, rates.nvme_write, seconds) == (1.0, 1.0, 0.0)
    assert min(rates.copy, rates.fresh_copy, rates.update) > 1e6


def test_a_rank_that_is_alone_has_no_collectives() -> None:
    threads = torch.get_num_threads()
    try:
        measured = measure(Task(operations=[], threads=1, ranks=1, rank=0, port=0, device="cpu"))
    finally:
        torch.set_num_threads(threads)

    assert measured.compute_seconds == 0.0
    assert measured.collective is None
    assert min(measured.copy, measured.link, measured.update, measured.device_update) > 0


def test_a_model_that_cannot_be_run_is_named() -> None:
    real_pass = RealPass(source="torch.nn:Identity", inputs="builtins:dict", samples=1, tokens=8, dtype=None)

    with pytest.raises(ConfigError, match="builtins:dict has raised TypeError"):
        measure(Task(operations=[], real_pass=real_pass, threads=1, ranks=1, rank=0, port=0, device="cpu"))
    wrong = replace(real_pass, inputs="tests.unit.trainer_client.plan.test_probe:too_many")
    with pytest.raises(ConfigError, match=r"cannot be run .TypeError.*give fewer --tokens than 8"):
        measure(Task(operations=[], real_pass=wrong, threads=1, ranks=1, rank=0, port=0, device="cpu"))


def too_many(samples: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"unknown": torch.zeros(samples, tokens)}


def test_memory_like_an_arenas_begins_at_a_huge_page() -> None:
    view = arena_like(3 * MIB)
    view[:] = b"a" * (3 * MIB)

    assert torch.frombuffer(view, dtype=torch.uint8).data_ptr() % (2 * MIB) == 0
    assert bytes(view[-2:]) == b"aa"


def test_the_limit_of_updates_adds_the_time_that_memory_takes() -> None:
    threads, small = torch.get_num_threads(), 1 << 16

    # No thread is faster than a billion billion elements a second, so all of the time is that of memory.
    limit = update_limit(torch.bfloat16, 2, 1e18, small)

    assert limit is not None and 0 < limit < 1e18
    assert update_limit(None, 2, 1.0, small) is None
    assert torch.get_num_threads() == threads


def test_the_update_of_the_probe_is_the_stores() -> None:
    elements = 1 << 19
    update = StoreUpdate(torch.bfloat16, elements)
    weight = update.weight.clone()
    states = {"exp_avg": update.first.clone(), "exp_avg_sq": update.second.clone(), "step": torch.tensor(9.0)}

    update()

    parameter = torch.nn.Parameter(weight)
    parameter.grad = update.gradient.float()
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.0, fused=True)
    optimizer.state[parameter] = states
    optimizer.step()
    assert torch.equal(update.weight, parameter.detach())
    assert update.rounded is not None and torch.equal(update.rounded, update.weight.bfloat16())
