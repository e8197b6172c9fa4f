"""The probe measures in the directory that it is given, leaves nothing there, and says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_client.errors import ConfigError
from trainer_client.plan.probe import measure, probe
from trainer_client.plan.store_probe import StoreUpdate, arena_like, probe_directory, update_rate

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
    assert min(rates.copy, rates.update) > 1e6


def test_a_rank_that_is_alone_has_no_collectives() -> None:
    threads = torch.get_num_threads()
    try:
        rates, seconds = measure(0, operations=[], dtype=None, ranks=1, threads=1, device="cpu", port=0)
    finally:
        torch.set_num_threads(threads)

    assert seconds == 0.0
    assert rates.keys() == {"copy", "device_link", "device_update"}
    assert min(rates.values()) > 0


def test_memory_like_an_arenas_begins_at_a_huge_page() -> None:
    view = arena_like(3 * MIB)
    view[:] = b"a" * (3 * MIB)

    assert torch.frombuffer(view, dtype=torch.uint8).data_ptr() % (2 * MIB) == 0
    assert bytes(view[-2:]) == b"aa"


def test_the_rate_of_updates_is_that_of_all_threads_and_leaves_torchs_threads_as_they_were() -> None:
    threads = torch.get_num_threads()

    assert update_rate(torch.bfloat16, 2, elements=1 << 19) > 0
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
