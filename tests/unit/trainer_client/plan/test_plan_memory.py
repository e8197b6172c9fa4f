"""`paramserver plan` counts what takes memory of a rank's device: units, gradients, copies under way, activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_client.plan.plans import BLOCK_BYTES, TWO_RANKS, WIDE_BYTES, line, planned_of, wide


def test_units_that_may_stay_gathered_take_memory(tmp_path: Path) -> None:
    def gathered(most: int) -> int:
        config = wide(3, ("nvme", "nvme"))
        config["zero_optimization"]["stage3_max_live_parameters"] = most
        return line(planned_of(tmp_path, "Wide", "", config), "gathered units")

    elements = BLOCK_BYTES // 4
    # Without the key only the unit that computes is gathered, because the root has no parameters.
    assert [gathered(most) for most in (0, 5 * elements, 10**9)] == [BLOCK_BYTES, 5 * BLOCK_BYTES, 12 * BLOCK_BYTES]


def test_gradients_on_their_way_to_the_store_take_memory_of_a_gpu(tmp_path: Path) -> None:
    def planned(micro_batches: int, **placement: str) -> dict[str, Any]:
        config = wide(2, ("device", "host"), micro_batches)
        config["paramserver"]["placement"] |= placement
        return planned_of(tmp_path, "Wide", "", config)

    once, several = planned(1), planned(4)

    assert line(once, "gradients between micro-batches") == 0
    assert line(several, "gradients between micro-batches") == WIDE_BYTES
    # The pass itself takes less where the sums are counted apart.
    assert 0 < line(several, "activations and gradients") < line(once, "activations and gradients")
    assert line(planned(4, gradients="device"), "gradients between micro-batches") == WIDE_BYTES


def test_the_only_pass_of_a_step_reduces_each_unit_at_any_stage(tmp_path: Path) -> None:
    def gradients(stage: int, micro_batches: int) -> int:
        config = wide(stage, ("device", "host"), micro_batches)
        found = planned_of(tmp_path, "Wide", TWO_RANKS, config)
        return line(found, "activations and gradients") + line(found, "gradients between micro-batches")

    # With several passes, stage 1 keeps the whole gradients of all twelve units until the last one.
    assert gradients(1, 1) == gradients(2, 1) < gradients(2, 4) < WIDE_BYTES < gradients(1, 4)


@pytest.mark.parametrize(
    ("homes", "options", "slots"),
    [
        (("nvme", "nvme"), "", 2),
        (("device", "host"), "", 0),
        (("device", "host"), TWO_RANKS, 2),
        (("nvme", "nvme"), f"{TWO_RANKS} --device cpu", 0),
    ],
)
def test_units_pass_through_two_slots_of_a_gpu(
    tmp_path: Path, homes: tuple[str, str], options: str, slots: int
) -> None:
    assert line(planned_of(tmp_path, "Wide", options, wide(3, homes)), "staging slots") == slots * BLOCK_BYTES
    assert line(planned_of(tmp_path, "Wide", options, wide(2, ("device", "host"))), "staging slots") == 0


def test_a_gather_from_the_store_fills_a_slot_with_one_part(tmp_path: Path) -> None:
    found = planned_of(
        tmp_path, "Wide", "--nproc-per-node 4 --collective 10GB", wide(3, ("nvme", "nvme"), gather="store")
    )

    assert line(found, "staging slots") == 2 * BLOCK_BYTES // 4


def test_the_gradients_of_four_units_may_wait_on_a_gpu_for_their_copy(tmp_path: Path) -> None:
    def waiting(homes: tuple[str, str], micro_batches: int = 1, options: str = "") -> int:
        found = planned_of(tmp_path, "Wide", options, wide(2, homes, micro_batches))
        return line(found, "gradients on their way")

    assert waiting(("device", "host")) == 4 * BLOCK_BYTES
    assert waiting(("device", "host"), options=TWO_RANKS) == 2 * BLOCK_BYTES
    # Sums that stay until the last pass are counted whole, and those at home on the device do not leave.
    assert waiting(("device", "host"), micro_batches=2) == waiting(("device", "device")) == 0
    assert waiting(("device", "host"), options="--device cpu") == 0


def test_parameters_that_a_device_has_updated_for_the_store_take_its_memory(tmp_path: Path) -> None:
    def updating(parameters: str, optimizer: str, **keys: Any) -> int:
        return line(planned_of(tmp_path, "Wide", "", wide(3, (parameters, optimizer)) | keys), "update on the device")

    assert [updating("device", "device"), updating("nvme", "host"), updating("nvme", "device")] == [0, 0, WIDE_BYTES]
    # In bf16 the gradient of one unit is fp32 for its update.
    assert updating("host", "device", bf16={"enabled": True}) == WIDE_BYTES // 2 + BLOCK_BYTES


def test_floating_point_inputs_are_in_the_dtype_of_the_parameters_as_in_a_run(tmp_path: Path) -> None:
    def activations(**keys: Any) -> int:
        found = planned_of(tmp_path, "Wide", "--tokens 8192", wide(2, ("device", "device")) | keys)
        return line(found, "activations and gradients")

    assert activations(bf16={"enabled": True}) == pytest.approx(activations() / 2, rel=0.01)


@pytest.mark.parametrize(("device", "copies"), [("cuda", 1), ("cpu", 3)])
def test_gradients_that_are_reduced_in_another_dtype_are_copied(tmp_path: Path, device: str, copies: int) -> None:
    def collectives(stage: int, **keys: Any) -> int:
        options = f"{TWO_RANKS} --device {device}"
        config = wide(stage, ("device", "host")) | {"bf16": {"enabled": True}} | keys
        return line(planned_of(tmp_path, "Wide", options, config), "collectives")

    wide_unit, narrow_unit = BLOCK_BYTES, BLOCK_BYTES // 2
    alike, wider = collectives(2), collectives(2, communication_data_type="fp32")
    # On the CPU, gloo keeps two copies of a gradient, and two of the parameters.
    assert alike == (4 * narrow_unit if device == "cpu" else 0)
    assert wider - alike == copies * wide_unit - (2 * narrow_unit if device == "cpu" else 0)


def test_autocast_makes_activations_smaller(tmp_path: Path) -> None:
    def activations(**keys: Any) -> int:
        found = planned_of(tmp_path, "Wide", "--tokens 8192", wide(2, ("device", "device")) | keys)
        return line(found, "activations and gradients") - WIDE_BYTES

    plain, under_autocast = activations(), activations(torch_autocast={"enabled": True, "dtype": "bfloat16"})

    assert 0.4 * plain < under_autocast < 0.75 * plain
