"""`paramserver plan` counts the bytes of a step that are read, written, reduced and sent to devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paramserver.contract.sizes import shown_size
from tests.unit.trainer_client.plan.plans import TWO_RANKS, WIDE_BYTES, line, planned_of, wide


def test_boundaries_are_counted_where_they_wait(tmp_path: Path) -> None:
    def planned(*, offloads: bool, budget: str = "128MiB") -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
            "activation_checkpointing": {"cpu_checkpointing": offloads},
            "paramserver": {"host_budget": budget},
        }
        options = "--nproc-per-node 2 --collective 1GB --tokens 2048"
        return planned_of(tmp_path, "Checkpointed", options, config)

    boundary, moved = 2048 * 256 * 4, 11 * 2048 * 256 * 4
    stay, leave, spill = planned(offloads=False), planned(offloads=True), planned(offloads=True, budget="16MiB")
    traffic = {
        name: [found["step"]["traffic"][name] for found in (stay, leave, spill)]
        for name in ("boundaries", "spilled_boundaries", "to_rank", "from_rank", "nvme_written")
    }
    assert traffic["boundaries"] == [0, 2 * moved, 2 * moved]
    for link in ("to_rank", "from_rank"):
        assert [nbytes - traffic[link][0] for nbytes in traffic[link]] == traffic["boundaries"]
    # Two of the twelve boundaries stay, two are on their way to the store, and one has memory to come back to.
    assert stay["rank"]["bytes"] - leave["rank"]["bytes"] == (12 - 2 - 3) * boundary
    assert leave["store"]["boundary_host_bytes"] == 2 * moved and not leave["store"]["spilled_boundary_bytes"]
    spilled = spill["store"]["spilled_boundary_bytes"]
    assert spill["store"]["boundary_host_bytes"] == 2 * moved - spilled and 0 < spilled < 2 * moved
    assert traffic["spilled_boundaries"] == [0, 0, 2 * spilled]
    assert traffic["nvme_written"][2] - traffic["nvme_written"][0] == 2 * spilled
    assert spill["store"]["nvme_bytes"] >= stay["store"]["nvme_bytes"] + 2 * moved
    assert not [note for note in stay["assumptions"] if "boundar" in note]
    assert [note for note in leave["assumptions"] if f"{shown_size(moved)}, and come back" in note]
    assert [note for note in spill["assumptions"] if f"{shown_size(spilled)} of boundaries of all ranks" in note]


def test_frozen_weights_are_gathered_again_with_what_is_trained_and_never_written(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
    }

    found = planned_of(tmp_path, "Adapters", TWO_RANKS, config)

    weight = 256 * 256 * 4
    traffic = found["step"]["traffic"]
    # The forward gathers all six blocks, and the backward again the three that are trained, but for the last one,
    # which stays. Only the adapters are reduced, and written with two states.
    assert traffic["collectives"] == (6 + 3) * 2 * weight + 4 * weight
    assert traffic["to_rank"] == (6 + 3) * 2 * weight // 2
    assert traffic["nvme_written"] == found["store"]["updated_bytes"] == 4 * 3 * weight
    assert found["store"]["written_bytes"] == 2 * 6 * weight + 2 * 4 * weight


@pytest.mark.parametrize(("model", "again"), [("head_trained", 0), ("first_trained", 5)])
def test_frozen_blocks_come_again_only_for_what_is_trained_before_them(tmp_path: Path, model: str, again: int) -> None:
    config = wide(3, ("nvme", "nvme"))

    traffic = planned_of(tmp_path, model, "", config)["step"]["traffic"]

    weight = 256 * 256 * 4
    # The root has two weights, and the last block stays between both passes.
    assert traffic["to_rank"] == (2 + 6 + again) * weight


@pytest.mark.parametrize("homes", [("device", "device"), ("device", "host"), ("device", "nvme")], ids=str)
def test_parameters_at_home_on_the_device_are_read_only_after_an_update_of_the_store(
    tmp_path: Path, homes: tuple[str, str]
) -> None:
    least = planned_of(tmp_path, "Wide", TWO_RANKS, wide(3, homes))["store"]["least_host_budget"]

    small = planned_of(tmp_path, "Wide", TWO_RANKS, wide(3, homes, micro_batches=8, host_budget=least))
    large = planned_of(tmp_path, "Wide", TWO_RANKS, wide(3, homes, micro_batches=8, host_budget="2GiB"))

    scarce, ample = (found["step"]["traffic"] for found in (small, large))
    assert small["store"]["spilled_gradient_bytes"] == WIDE_BYTES and not large["store"]["spilled_gradient_bytes"]
    assert ample["nvme_read"] == 0
    if homes[1] == "device":
        assert (scarce["to_rank"], scarce["nvme_read"], scarce["hit"]) == (0, 0, 1.0)
        assert scarce["nvme_written"] == 3 * WIDE_BYTES
    elif homes[1] == "host":
        # Weights are kept with their states.
        assert scarce["nvme_read"] == scarce["nvme_written"] - ample["nvme_written"] > 0
    else:
        # Weights are read for the update, with two states, and once more for the devices.
        assert scarce["to_rank"] == WIDE_BYTES // 2
        reads = scarce["nvme_read"] - (scarce["nvme_written"] - ample["nvme_written"])
        assert reads == pytest.approx(
            3 * WIDE_BYTES * (1 - scarce["states_hit"]) + WIDE_BYTES * (1 - scarce["hit"]), abs=16
        )


@pytest.mark.parametrize(
    ("stage", "key", "reductions"), [(1, {}, 1), (2, {}, 4), (2, {"communication_data_type": "bf16"}, 4)], ids=str
)
def test_each_micro_batch_of_a_stage_that_shards_gradients_reduces_them(
    tmp_path: Path, stage: int, key: dict[str, str], reductions: int
) -> None:
    config = wide(stage, ("device", "host"), micro_batches=4, host_budget="1GiB") | key

    traffic = planned_of(tmp_path, "Wide", TWO_RANKS, config)["step"]["traffic"]

    # The parameters are gathered once, after the update. The root has none here.
    assert traffic["collectives"] == reductions * (WIDE_BYTES // 2 if key else WIDE_BYTES) + WIDE_BYTES


def test_sums_of_gradients_stay_on_a_gpu_until_the_last_micro_batch(tmp_path: Path) -> None:
    least = planned_of(tmp_path, "Wide", "", wide(3, ("nvme", "host")))["store"]["least_host_budget"]

    def spilled(micro_batches: int, options: str) -> int:
        config = wide(3, ("nvme", "host"), micro_batches, host_budget=least)
        found = planned_of(tmp_path, "Wide", options, config)
        nbytes: int = found["step"]["traffic"]["nvme_written"] - found["store"]["updated_bytes"]
        return nbytes

    once = spilled(1, "")
    assert once > 0
    assert spilled(4, "") == once
    assert spilled(4, "--device cpu") == 4 * once


def test_gradients_that_are_reduced_once_are_spilled_once_on_the_cpu(tmp_path: Path) -> None:
    options = f"--device cpu {TWO_RANKS}"

    def spilled(stage: int, micro_batches: int) -> int:
        config = wide(stage, ("device", "nvme"), micro_batches)
        config["paramserver"]["placement"]["gradients"] = "nvme"
        config["gradient_clipping"] = 1.0
        found = planned_of(tmp_path, "Wide", options, config)
        nbytes: int = found["step"]["traffic"]["nvme_written"] - found["store"]["updated_bytes"]
        return nbytes

    assert spilled(1, 1) == spilled(1, 4) == spilled(2, 1) == WIDE_BYTES
    assert spilled(2, 4) == 4 * WIDE_BYTES


@pytest.mark.parametrize(
    ("homes", "durability", "put", "written"),
    [
        # Fractions of the weights, of which the states have two more.
        (("host", "host"), "step", 0, 3),
        (("host", "host"), "snapshot:3", 0, 1),
        (("host", "host"), "none", 0, 0),
        # The states of the device are handed over in each step, because the weights are in the store.
        (("host", "device"), "snapshot:3", 3, 2 + 1 / 3),
        (("host", "device"), "none", 3, 2),
        # Nothing changes in the store by an update, so that only the commits that are asked for are made.
        (("device", "device"), "snapshot:3", 1, 1),
        (("device", "device"), "none", 0, 0),
        # A half of the groups is updated in the store, so that each step is committed with the other half.
        (("device", {"device": 0.5, "host": 0.5}), "snapshot:3", 1.5, 1.5 + 1.5 / 3),
    ],
    ids=str,
)
def test_commits_hand_over_and_write_what_their_durability_asks_for(
    tmp_path: Path, homes: tuple[Any, Any], durability: str, put: float, written: float
) -> None:
    config = wide(3, homes, host_budget="1GiB", durability=durability)

    traffic = planned_of(tmp_path, "Wide", "", config)["step"]["traffic"]

    assert traffic["put"] == pytest.approx(put * WIDE_BYTES)
    assert traffic["nvme_written"] == pytest.approx(written * WIDE_BYTES)


def test_a_gather_from_the_store_reads_all_partitions_over_the_link(tmp_path: Path) -> None:
    ranks = "--nproc-per-node 4 --collective 10GB"

    def traffic(gather: str, options: str = "") -> dict[str, Any]:
        config = wide(3, ("host", "host"), host_budget="1GiB", gather=gather)
        found: dict[str, Any] = planned_of(tmp_path, "Wide", f"{ranks} {options}", config)["step"]["traffic"]
        return found

    collective, store = traffic("auto"), traffic("store")
    assert store["to_rank"] == 4 * collective["to_rank"] > 0
    # Only gradients are reduced.
    assert store["collectives"] == WIDE_BYTES
    assert collective["collectives"] == WIDE_BYTES + store["to_rank"]
    on_cpu = traffic("collective", "--device cpu")
    assert (on_cpu["mapped"], on_cpu["collectives"]) == (0, collective["collectives"])
    assert traffic("auto", "--device cpu")["mapped"] == WIDE_BYTES


def test_states_for_which_the_host_budget_has_room_are_not_read(tmp_path: Path) -> None:
    def traffic(budget: int) -> tuple[dict[str, Any], dict[str, Any]]:
        found = planned_of(tmp_path, None, f"--host-budget {budget}")
        return found["store"], found["step"]["traffic"]

    store, ample = traffic(128 << 20)
    _, scarce = traffic(store["least_host_budget"])

    assert 0 <= scarce["states_hit"] < ample["states_hit"] == 1
    assert scarce["nvme_read"] > ample["nvme_read"] == 0


def test_copies_on_the_device_take_its_memory_and_save_traffic(tmp_path: Path) -> None:
    def planned(budget: str) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
            "paramserver": {"gpu_budget": budget},
        }
        return planned_of(tmp_path, None, "", config)

    without, part, whole = planned("0"), planned("200KiB"), planned("1GiB")

    assert [line(found, "copies of parameters") for found in (without, part)] == [0, 200 << 10]
    assert 4 * whole["parameters"] <= line(whole, "copies of parameters") < 4 * whole["parameters"] + 512 * 8
    hits = [found["step"]["traffic"]["device_hit"] for found in (without, part, whole)]
    # The root and the last block are read once in each of four micro-batches, the first block twice.
    assert 0.0 == hits[0] < hits[1] < hits[2] < 1.0
    read, *less = (found["step"]["traffic"]["to_rank"] for found in (without, part, whole))
    assert [found / read for found in less] == pytest.approx([1.0 - hit for hit in hits[1:]], abs=0.01)
