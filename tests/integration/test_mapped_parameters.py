"""On the CPU, gathered parameters are views of the store's own memory: the trainer copies nothing, writes to them do
not reach the store, and a computation with bytes of an ended session ends with an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from paramserver.contract.limits import UNITS_MAPPED_AT_ONCE
from storage.tiers.arena import NAME as ARENA
from tests.integration.support.daemon import MIB, Daemon, tiers
from tests.integration.support.gathers import count_gathers
from tests.integration.support.ranks import run_ranks
from tests.integration.support.tower import Tower
from tests.integration.support.waiting import wait_until
from trainer_client import Engine
from trainer_client.errors import InPlaceChangeError, SessionEndedError

WIDTH = 128
BLOCKS = 6


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = {"host_budget": 16 * MIB, "nvme_budget": 256 * MIB}
    with Daemon(tmp_path_factory.mktemp("mapped") / "state", settings) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log


def start(daemon: Daemon, job: str, home: str = "cpu", **zero: Any) -> Engine:
    offload = {"device": home}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload, **zero},
        "paramserver": {"address": daemon.address, "job": job},
    }
    return trainer_client.initialize(model=Tower(WIDTH, BLOCKS), config=config)[0]


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(engine: Engine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(inputs(step)))
        engine.step()


def mapping_at(address: int) -> str:
    """Return the line of /proc/self/maps that contains an address, or ""."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line
    return ""


def private_mappings_of_arena() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if ARENA in line and line.split()[1] == "rw-p"]


@pytest.mark.parametrize(
    ("home", "of_second_step"),
    [
        # Units that are mapped where they live take no memory of the trainer. From the second step on they stay mapped
        # from the forward to the backward, which need not gather them again.
        pytest.param("cpu", 1 + BLOCKS, id="cpu"),
        # The last block of the forward is the first of the backward, so it stays gathered.
        pytest.param("nvme", 1 + BLOCKS + BLOCKS - 1, id="nvme"),
    ],
)
def test_nothing_is_copied_to_gather_a_unit(daemon: Daemon, home: str, of_second_step: int) -> None:
    seen: list[str] = []
    with start(daemon, f"copies-{home}", home) as engine:
        for block in engine.module.blocks:
            block.inside = lambda linear: seen.append(mapping_at(linear.weight.data_ptr()))
        counters = count_gathers(engine)
        train(engine, 2)
        counted = counters.snapshot().total

    assert len(seen) == 2 * BLOCKS
    assert all(ARENA in line and line.split()[1] == "rw-p" for line in seen), seen
    assert counted.gathers == 1 + BLOCKS + BLOCKS + of_second_step
    assert counted.fetched_bytes > 0
    assert counted.copied_bytes == 0


def test_training_with_mapped_parameters_gives_the_numbers_of_plain_torch(daemon: Daemon) -> None:
    assert_numbers_of_plain_torch(daemon)


def test_memory_in_huge_pages_is_copied_where_it_cannot_be_mapped(tmp_path: Path) -> None:
    """A mapping of huge pages must begin at a huge page. Where the system has none to give, the daemon uses usual
    pages."""
    settings = {"host_budget": 16 * MIB, "nvme_budget": 256 * MIB, "huge_pages": True}
    with Daemon(tmp_path / "state", settings) as daemon:
        assert_numbers_of_plain_torch(daemon)


def assert_numbers_of_plain_torch(daemon: Daemon) -> None:
    model = Tower(WIDTH, BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with start(daemon, "numbers", "nvme") as engine:
        train(engine, 4)
        trained = engine.full_state_dict()
    for step in range(4):
        model(inputs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_what_is_written_into_a_parameter_in_a_forward_is_an_error_and_stays_in_this_process(
    daemon: Daemon, home: str
) -> None:
    def overwrite(linear: nn.Linear) -> None:
        linear.weight.data.fill_(7.0)

    with start(daemon, f"writes-{home}", home) as engine:
        train(engine, 1)
        before = engine.get_full("blocks.2.linear.weight", "param")
        engine.module.blocks[2].inside = overwrite
        lost = pytest.raises(InPlaceChangeError, match=r"parameter blocks\.2\.linear\.weight was changed in place")
        with torch.no_grad(), lost:
            engine(inputs(0))
        after = engine.get_full("blocks.2.linear.weight", "param")

    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_results_of_a_session_that_is_over_are_not_given_out(daemon: Daemon) -> None:
    with start(daemon, "ended") as engine:
        train(engine, 1)
        arena = engine._store._attachments.current.arena
        assert arena is not None
        generation = arena.generation()

        def end(_: nn.Linear) -> None:
            # This changes the generation that the trainer expects, as if the store had ended the session.
            generation._given += 1

        engine.module.blocks[-1].inside = end
        with pytest.raises(SessionEndedError), torch.no_grad():
            engine(inputs(0))
        generation._given -= 1


@pytest.mark.parametrize(
    ("home", "units_at_once"),
    [
        # A unit in the store's host memory is leased until its last use in the step.
        pytest.param("cpu", BLOCKS + 1, id="cpu"),
        # The root and this unit are leased, and at times also the units before and after it.
        pytest.param("nvme", 4, id="nvme"),
    ],
)
def test_leases_last_as_long_as_units_are_in_use_and_gathered_holds_none(
    daemon: Daemon, home: str, units_at_once: int
) -> None:
    unit_bytes = (WIDTH + 1) * WIDTH * 4
    page_bytes = 4096

    def look(_: nn.Linear) -> None:
        most = units_at_once * (unit_bytes + page_bytes)
        wait_until(lambda: 2 * unit_bytes <= tiers(daemon.address)[0].leased_bytes <= most, seconds=10)

    with start(daemon, f"leases-{home}", home) as engine:
        train(engine, 1)
        for block in engine.module.blocks:
            block.inside = look
        train(engine, 1)

        with engine.gathered(engine.module):
            wait_until(lambda: tiers(daemon.address)[0].leased_bytes == 0, seconds=10)
            assert all(ARENA not in mapping_at(p.data_ptr()) for p in engine.module.parameters())


def test_units_that_stay_gathered_take_no_room_from_those_that_pass(daemon: Daemon) -> None:
    for home in ("cpu", "nvme"):
        with start(daemon, f"stays-{home}", home, stage3_max_live_parameters=10**9) as engine:
            counters = count_gathers(engine)
            train(engine, 2)
            counted = counters.snapshot().total
            # Units that live on the host are mapped and not copied. Of the other units at most three are mapped at
            # once, and the rest are copied to make room.
            copied = counted.fetched_bytes * (BLOCKS + 1 - UNITS_MAPPED_AT_ONCE) // (BLOCKS + 1)
            assert (counted.gathers, counted.copied_bytes) == (2 * (BLOCKS + 1), copied if home == "nvme" else 0)


def test_ranks_that_share_a_store_map_what_lives_in_its_memory(tmp_path: Path) -> None:
    settings = {"host_budget": 128 * MIB, "nvme_budget": 256 * MIB}
    with Daemon(tmp_path / "state", settings) as daemon:
        run_ranks("tests.integration.support.mapped_ranks", 2, daemon.address, tmp_path)

    for rank in range(2):
        counted = json.loads((tmp_path / f"{rank}.json").read_text())
        for fqn in ("blocks.0", "blocks.1", "blocks.2"):
            assert counted["cpu"][fqn]["fetched_bytes"] > 0
            assert counted["cpu"][fqn]["copied_bytes"] == 0
            assert counted["nvme"][fqn]["copied_bytes"] == counted["nvme"][fqn]["fetched_bytes"]


def test_nothing_of_the_store_is_mapped_after_the_end(daemon: Daemon) -> None:
    engine = start(daemon, "unmapped")
    engine(inputs(0))  # The graph needs the root, so the root stays gathered.
    assert private_mappings_of_arena()
    engine.close()
    assert private_mappings_of_arena() == []
