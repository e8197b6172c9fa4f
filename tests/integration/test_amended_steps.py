"""What ranks change after a step and before `wait_for_commit()`: a resume has it of all ranks, or of none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.support.amending_ranks import Plan, play
from tests.integration.support.daemon import Stores, serving
from trainer_client.exchange.export import export_step

CONFIG = {"host_budget": "48MiB", "nvme_budget": "256MiB", "session_grace_seconds": 0.5}
LOST = "The script has changed buffers after its steps (bias, engine.client_state)"


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with serving(tmp_path, ("first", "second"), CONFIG) as daemons:
        yield Stores(*daemons)


def test_a_step_on_two_nodes_has_the_changes_of_all_ranks_or_of_none(stores: Stores, tmp_path: Path) -> None:
    both = (stores.first.address, stores.second.address)
    begun, _ = play(Plan(job="job", addresses=both, waiting=(0, 1), steps=2), tmp_path / "1")
    assert begun == [[0, [0, 0], {}], [0, [0, 0], {}]]
    # Both ranks have waited after their last changes. Then only one does.
    resumed, output = play(Plan(job="job", addresses=both, waiting=(0,)), tmp_path / "2")
    assert resumed == [[2, [2, 0], {"seen": 2}], [2, [2, 2], {}]]
    assert "changed buffers" not in output
    resumed, output = play(Plan(job="job", addresses=both, waiting=(1,)), tmp_path / "3")
    assert resumed == [[3, [2, 0], {"seen": 2}], [3, [2, 2], {}]]
    assert LOST in output
    resumed, output = play(Plan(job="job", addresses=both, waiting=(0, 1)), tmp_path / "4")
    assert resumed == [[4, [2, 0], {"seen": 2}], [4, [2, 2], {}]]
    assert "The script has changed buffers after its steps (" in output


def test_a_rank_that_waits_alone_loses_nothing_where_nothing_was_changed(stores: Stores, tmp_path: Path) -> None:
    both = (stores.first.address, stores.second.address)
    plan = Plan(job="job", addresses=both, waiting=(0,), changes=False)
    play(plan, tmp_path / "1")
    resumed, output = play(plan, tmp_path / "2")
    assert resumed == [[1, [0, 0], {}]] * 2
    assert "changed buffers" not in output


def test_other_ranks_and_readers_get_the_changes_of_all_ranks_or_of_none(stores: Stores, tmp_path: Path) -> None:
    address = stores.first.address
    for job, waiting, bias in (("all", (0, 1), [1, 0]), ("one", (0,), [0, 0])):
        play(Plan(job=job, addresses=(address, address), waiting=waiting), tmp_path / job)
        export_step(address, job, None, tmp_path / f"{job}-files")
        assert load_file(tmp_path / f"{job}-files" / "model.safetensors")["bias"].tolist() == bias
        resumed, output = play(Plan(job=job, addresses=(address,), waiting=()), tmp_path / f"{job}-resumed")
        assert resumed == [[1, bias, {"seen": 1} if bias[0] else {}]]
        assert (LOST in output) == (job == "one")
