"""The figures of a plan for a node of GPUs are those that the published figures give by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_client.plan.plans import plan, planned_of
from trainer_client.plan.layout import World
from trainer_client.plan.nodes import NODES, collective_latency

# The groups of a GPT-2 of two blocks: the root's and one of each block.
GROUPS = 3
# The elements of a block: its four products with biases, and two norms.
BLOCK = 12 * 64 * 64 + 13 * 64


def planned(tmp_path: Path, options: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    found = planned_of(tmp_path, None, options, config, machine="")
    assert found["fits"]
    return found


@pytest.mark.parametrize(
    ("nodes", "bytes_per_second", "latency"),
    [
        # Seven of eight parts at 360 GB/s; seven steps of 3.4 us after 8.4 us.
        (1, 360e9 * 8 / 7, 32.2e-6),
        # Half of the buffer through eight interfaces of 47 GB/s takes 1.33 ps a byte, fifteen sixteenths at 360 GB/s
        # take 2.60 ps. Fourteen steps in the nodes, and one between them.
        (2, 360e9 * 16 / 15, 70.0e-6),
        # 1,249 of 1,250 parts take 2.657 ps a byte through the interfaces, and 2.778 ps over the links of the GPUs.
        (1250, 360e9 * 10_000 / 9_999, 8.4e-6 + 8_750 * 3.4e-6 + 1_249 * 14e-6),
    ],
)
def test_collectives_scale_as_the_links_do(nodes: int, bytes_per_second: float, latency: float) -> None:
    world = World(ranks=8, nodes=nodes)

    assert NODES["h100x8"].collective_rate(world) == pytest.approx(bytes_per_second)
    assert collective_latency(world) == pytest.approx(latency)


def test_a_rank_that_is_alone_has_no_collectives() -> None:
    assert NODES["h100x8"].collective_rate(World(ranks=1)) is None
    assert collective_latency(World(ranks=1)) == 0.0


def test_each_resource_is_its_bytes_over_the_published_rate(tmp_path: Path) -> None:
    found = planned(tmp_path, "--node h100x8 --optimizer-threads 4")

    step, store = found["step"], found["store"]
    traffic, resources = step["traffic"], step["resources"]
    assert found["world"] == {"ranks_per_node": 8, "nodes": 1} and found["device"] == "cuda"
    assert found["capacities"]["device"] == 80e9
    # Each rank has an eighth of the parameters, which are padded. They come in forward and backward, but the root and
    # the last block once, which stay gathered between both; its gradient goes. Each gradient is reduced once.
    assert traffic["collective_calls"] == GROUPS + 1 + GROUPS
    assert traffic["collectives"] == pytest.approx(2 * (2 * found["parameters"] + BLOCK), rel=0.02)
    assert resources["collectives"] == pytest.approx(traffic["collectives"] / (360e9 * 8 / 7) + 7 * 32.2e-6)
    assert resources["store_link"] == pytest.approx((traffic["to_rank"] + traffic["from_rank"]) / 54.4e9)
    assert resources["nvme_written"] == pytest.approx(store["written_bytes"] / 28e9)
    # The weights, two states and the parameters are written; in this small model whole pages of them are much more.
    assert 14 * found["parameters"] < store["written_bytes"] < 1.2 * 14 * found["parameters"]
    updating, moved = traffic["updated"] / 0.41e9, traffic["nvme_read"] + traffic["nvme_written"]
    assert step["store_cpu_seconds"] == pytest.approx(updating + moved * 0.15e-9)
    assert resources["store_processor"] == pytest.approx((updating + moved * 0.085e-9) / 4)
    links = 8 * (traffic["to_rank"] + traffic["from_rank"])
    assert resources["host_memory"] == pytest.approx((moved + links + 28 * traffic["updated"]) / (614.4e9 * 0.7))
    assert resources["compute"] == pytest.approx(step["flops"] / 400e12)
    assert step["seconds"] == max(resources.values())


@pytest.mark.parametrize(
    ("durability", "key", "in_memory", "aside"),
    [
        ("none", {}, 1, 1),
        ("snapshot:5", {}, 1, 1),
        ("none", {"gradient_clipping": 1.0}, 1, 0),
        ("none", {"paramserver": {"durability": "none", "placement": {"gradients": "device"}}}, 1, 0),
        ("step", {}, 0, 0),
    ],
)
def test_updates_in_host_memory_take_the_time_of_threads_and_of_memory(
    tmp_path: Path, durability: str, key: dict[str, Any], in_memory: int, aside: int
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "paramserver": {"durability": durability},
        **key,
    }
    options = "--nproc-per-node 1 --host-budget 1GiB --optimizer-threads"

    few, many = (planned(tmp_path, f"--node h200x8 {options} {threads}", config)["step"] for threads in (8, 14))

    traffic = few["traffic"]
    updated = traffic["updated"]
    assert (traffic["updated_in_memory"], traffic["updated_aside"]) == (in_memory * updated, aside * updated)
    factor = 1 / 0.55 if aside else 1.0
    moved = traffic["nvme_read"] + traffic["nvme_written"]
    for step, threads in ((few, 8), (many, 14)):
        alone = (factor * updated / 0.41e9 + moved * 0.085e-9) / threads
        together = in_memory * factor * updated / 3.5e9
        assert step["resources"]["store_processor"] == pytest.approx(alone + together)
    through = moved + traffic["to_rank"] + traffic["from_rank"] + (44 if in_memory else 28) * updated
    assert few["resources"]["host_memory"] == pytest.approx(through / (614.4e9 * 0.7))


@pytest.mark.parametrize(
    ("node", "threads", "measured"),
    [("h200x8", 8, 1.8e9), ("h200x8", 14, 2.2e9), ("h100x8", 8, 2.7e9), ("h100x8", 16, 3.3e9)],
)
def test_the_rate_of_updates_in_host_memory_is_near_to_what_was_measured(
    node: str, threads: int, measured: float
) -> None:
    rates = NODES[node].rates(World(ranks=1))
    assert rates.update_limit is not None

    rate = 1 / (1 / (threads * rates.update) + 1 / rates.update_limit)

    assert 0.85 < rate / measured < 1.1


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
