"""The figures of a plan for a node of GPUs are those that the published figures give by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_client.plan.plans import plan, planned_of
from trainer_client.plan.layout import World
from trainer_client.plan.nodes import NODES

# The elements of a block: its four products with biases, and two norms.
BLOCK = 12 * 64 * 64 + 13 * 64


def planned(tmp_path: Path, options: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    found = planned_of(tmp_path, None, options, config, machine="")
    assert found["fits"]
    return found


@pytest.mark.parametrize(
    ("nodes", "bytes_per_second"),
    [
        # Seven of eight parts at 450 GB/s.
        (1, 450e9 * 8 / 7),
        # Half of the buffer through eight interfaces of 47 GB/s takes 1.33 ps a byte, fifteen sixteenths at 450 GB/s
        # take 2.08 ps.
        (2, 450e9 * 16 / 15),
        # 1,249 of 1,250 parts through the eight interfaces take 2.66 ps a byte, and over the links of the GPUs 2.22 ps.
        (1250, 8 * 47e9 * 1250 / 1249),
    ],
)
def test_collectives_scale_as_the_links_do(nodes: int, bytes_per_second: float) -> None:
    assert NODES["h100x8"].collective_rate(World(ranks=8, nodes=nodes)) == pytest.approx(bytes_per_second)


def test_a_rank_that_is_alone_has_no_collectives() -> None:
    assert NODES["h100x8"].collective_rate(World(ranks=1)) is None


def test_each_resource_is_its_bytes_over_the_published_rate(tmp_path: Path) -> None:
    found = planned(tmp_path, "--node h100x8 --optimizer-threads 4")

    step, store = found["step"], found["store"]
    traffic, resources = step["traffic"], step["resources"]
    assert found["world"] == {"ranks_per_node": 8, "nodes": 1} and found["device"] == "cuda"
    assert found["capacities"]["device"] == 80e9
    # Each rank has an eighth of the parameters, which are padded. They come in forward and backward, but the root and
    # the last block once, which stay gathered between both; its gradient goes. Each gradient is reduced once.
    assert traffic["collectives"] == pytest.approx(2 * (2 * found["parameters"] + BLOCK), rel=0.02)
    assert resources["collectives"] == pytest.approx(traffic["collectives"] / (450e9 * 8 / 7))
    link = traffic["to_rank"] + traffic["from_rank"]
    assert resources["store_link"] == pytest.approx(link / 55e9)
    assert traffic["nvme_written"] == store["written_bytes"]
    # Eight devices divide their time.
    assert resources["nvme"] == pytest.approx(traffic["nvme_read"] / 52e9 + store["written_bytes"] / 28e9)
    # The weights, two states and the parameters are written; in this small model whole pages of them are much more.
    assert 14 * found["parameters"] < store["written_bytes"] < 1.2 * 14 * found["parameters"]
    assert resources["store_update"] == pytest.approx(traffic["updated"] / (4 * 0.41e9))
    moved = traffic["nvme_read"] + traffic["nvme_written"] + 8 * link + 28 * traffic["updated"]
    assert resources["host_memory"] == pytest.approx(moved / 614.4e9)
    assert resources["compute"] == pytest.approx(step["flops"] / 400e12)
    assert step["overlapped_seconds"] == max(resources.values())


def test_threads_of_the_store_update_no_more_than_was_measured() -> None:
    few, many = (NODES["h200x8"].rates(World(ranks=8), threads).update for threads in (4, 16))

    assert (few, many) == (4 * 0.41e9, 2.2e9)


def test_states_on_the_device_are_updated_at_the_rate_of_its_memory(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
        "paramserver": {"durability": "none"},
    }

    slow, fast = (planned(tmp_path, f"--node {node}", config) for node in ("h100x8", "h200x8"))

    elements = slow["step"]["traffic"]["updated_on_device"]
    assert slow["step"]["resources"]["device_update"] == pytest.approx(elements * 28 / 3350e9)
    assert fast["step"]["resources"]["device_update"] == pytest.approx(elements * 28 / 4800e9)


def test_options_win_over_the_node(tmp_path: Path) -> None:
    found = planned(tmp_path, "--node h200x8 --nnodes 4 --nproc-per-node 4 --device-link 450GB --hbm 96GB --flops 1e14")

    assert found["world"] == {"ranks_per_node": 4, "nodes": 4}
    assert found["rates"]["device_link"] == 450e9
    assert found["capacities"]["device"] == 96e9
    assert found["step"]["resources"]["compute"] == pytest.approx(found["step"]["flops"] / 1e14)


def test_a_node_that_is_not_known_is_named(tmp_path: Path) -> None:
    result = plan(tmp_path, "--node v100x8")

    assert result.exit_code == 2
    assert "--node v100x8: known are h100x8, h200x8" in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["--device cpu", "--nproc-per-node 16"])
def test_a_node_has_a_rank_on_each_of_its_gpus(tmp_path: Path, option: str) -> None:
    result = plan(tmp_path, f"--node h100x8 {option}")

    assert result.exit_code == 2
    assert "--node has 8 GPUs, each with one rank" in " ".join(result.stderr.split())
