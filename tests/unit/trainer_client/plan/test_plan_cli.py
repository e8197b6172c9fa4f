"""`paramserver plan` says whether a job fits and what would make it fit, and names options that cannot be honoured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner, Result

from paramserver.device_reads import find_hits
from paramserver.store_need import find_need
from trainer_client.plan.cli import app
from trainer_client.plan.machine import Capacities

MODEL: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 300,
    "n_positions": 32,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MACHINE = (
    "--no-probe --device cuda --hbm 8GiB --host-memory 16GiB --nvme-capacity 64GiB --nvme-read 4GB --nvme-write 2GB"
)
LINKS = "--device-link 20GB --flops 1e13"


def plan(tmp_path: Path, options: str, config: dict[str, Any] | None = None) -> Result:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    arguments = [str(tmp_path), *options.split()]
    if config is not None:
        (tmp_path / "training.json").write_text(json.dumps(config))
        arguments += ["--config", str(tmp_path / "training.json")]
    return CliRunner().invoke(app, arguments, obj=(find_need, find_hits))


def test_a_plan_for_another_machine_needs_no_probe(tmp_path: Path) -> None:
    result = plan(tmp_path, f"{MACHINE} {LINKS} --tokens 16 --json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"] and found["parameters"] == 121_344
    assert found["step"]["resources"]["nvme_written"] == found["store"]["written_bytes"] / 2e9
    assert found["step"]["seconds"] == max(found["step"]["resources"].values())
    assert found["best"]["seconds"] <= found["step"]["seconds"]


class Checkpointed(nn.Module):
    """Blocks of which each is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(256, 256) for _ in range(12)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 1.0
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()


def rows(samples: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"hidden": torch.zeros(samples * tokens, 256)}


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
        (tmp_path / "training.json").write_text(json.dumps(config))
        options = f"{MACHINE} {LINKS} --no-search --json --nproc-per-node 2 --collective 1GB --tokens 2048".split()
        arguments = [f"{__name__}:Checkpointed", *options, "--config", str(tmp_path / "training.json")]
        arguments += ["--inputs", f"{__name__}:rows"]
        found: dict[str, Any] = json.loads(
            CliRunner().invoke(app, arguments, obj=(find_need, find_hits), catch_exceptions=False).stdout
        )
        return found

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
    assert [note for note in leave["assumptions"] if f"{moved} bytes, and come back" in note]
    assert [note for note in spill["assumptions"] if f"{spilled} bytes of boundaries of all ranks" in note]


class Adapted(nn.Module):
    """A block of frozen weights with a small adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.frozen(hidden) + self.adapter(hidden)


class Adapters(nn.Module):
    """Blocks with adapters, of which the first two are frozen as a whole."""

    def __init__(self, blocks: int = 6, frozen: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted() for _ in range(blocks)])
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def planned_of(tmp_path: Path, model: str, options: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of a model of this module, whose inputs are `rows`."""
    (tmp_path / "training.json").write_text(json.dumps(config))
    arguments = [f"{__name__}:{model}", "--inputs", f"{__name__}:rows", "--config", str(tmp_path / "training.json")]
    arguments += f"{MACHINE} {LINKS} --no-search --json --tokens 16 {options}".split()
    result = CliRunner().invoke(app, arguments, obj=(find_need, find_hits), catch_exceptions=False)
    assert result.exit_code in (0, 3), result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_frozen_weights_are_gathered_again_with_what_is_trained_and_never_written(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
    }

    found = planned_of(tmp_path, "Adapters", "--nproc-per-node 2 --collective 10GB", config)

    weight = 256 * 256 * 4
    traffic = found["step"]["traffic"]
    # The forward gathers all six blocks, and the backward again the three that are trained, but for the last one,
    # which stays. Only the adapters are reduced, and written with two states.
    assert traffic["collectives"] == (6 + 3) * 2 * weight + 4 * weight
    assert traffic["to_rank"] == (6 + 3) * 2 * weight // 2
    assert traffic["nvme_written"] == found["store"]["updated_bytes"] == 4 * 3 * weight
    assert found["store"]["written_bytes"] == 2 * 6 * weight + 2 * 4 * weight


class Headed(nn.Module):
    """Frozen blocks between an embedding and a head, of which one is trained."""

    def __init__(self, *, trains_head: bool) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(6)])
        self.head = nn.Linear(256, 256, bias=False)
        for part in (self.blocks, self.first if trains_head else self.head):
            part.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def head_trained() -> nn.Module:
    return Headed(trains_head=True)


def first_trained() -> nn.Module:
    return Headed(trains_head=False)


@pytest.mark.parametrize(("model", "again"), [("head_trained", 0), ("first_trained", 5)])
def test_frozen_blocks_come_again_only_for_what_is_trained_before_them(tmp_path: Path, model: str, again: int) -> None:
    config = wide(3, ("nvme", "nvme"))

    traffic = planned_of(tmp_path, model, "", config)["step"]["traffic"]

    weight = 256 * 256 * 4
    # The root has two weights, and the last block stays between both passes.
    assert traffic["to_rank"] == (2 + 6 + again) * weight


class Wide(nn.Module):
    """Blocks of 8 MiB in fp32 each."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(256, 4096, bias=False), nn.Linear(4096, 256, bias=False)) for _ in range(12)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.square().mean()


def wide(stage: int, homes: tuple[Any, Any], micro_batches: int = 1, **section: Any) -> dict[str, Any]:
    """Return a config for a Wide in fp32."""
    placement = {"parameters": homes[0], "optimizer": homes[1]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "paramserver": {"placement": placement, "nvme_budget": "4GiB", **section},
    }


@pytest.mark.parametrize("homes", [("device", "device"), ("device", "host"), ("device", "nvme")], ids=str)
def test_parameters_at_home_on_the_device_are_read_only_after_an_update_of_the_store(
    tmp_path: Path, homes: tuple[str, str]
) -> None:
    ranks, weights = "--nproc-per-node 2 --collective 10GB", 12 * (8 << 20)
    least = planned_of(tmp_path, "Wide", ranks, wide(3, homes))["store"]["least_host_budget"]

    small = planned_of(tmp_path, "Wide", ranks, wide(3, homes, micro_batches=8, host_budget=least))
    large = planned_of(tmp_path, "Wide", ranks, wide(3, homes, micro_batches=8, host_budget="2GiB"))

    scarce, ample = (found["step"]["traffic"] for found in (small, large))
    assert small["store"]["spilled_gradient_bytes"] == weights and not large["store"]["spilled_gradient_bytes"]
    assert ample["nvme_read"] == 0
    if homes[1] == "device":
        assert (scarce["to_rank"], scarce["nvme_read"], scarce["hit"]) == (0, 0, 1.0)
        assert scarce["nvme_written"] == 3 * weights
    elif homes[1] == "host":
        # Weights are kept with their states.
        assert scarce["nvme_read"] == scarce["nvme_written"] - ample["nvme_written"] > 0
    else:
        # Weights are read for the update, with two states, and once more for the devices.
        assert scarce["to_rank"] == scarce["returned"] == weights // 2
        reads = scarce["nvme_read"] - (scarce["nvme_written"] - ample["nvme_written"])
        assert reads == pytest.approx(3 * weights * (1 - scarce["states_hit"]) + weights * (1 - scarce["hit"]), abs=16)


@pytest.mark.parametrize(
    ("stage", "key", "reductions"), [(1, {}, 1), (2, {}, 4), (2, {"communication_data_type": "bf16"}, 4)], ids=str
)
def test_each_micro_batch_of_a_stage_that_shards_gradients_reduces_them(
    tmp_path: Path, stage: int, key: dict[str, str], reductions: int
) -> None:
    config = wide(stage, ("device", "host"), micro_batches=4, host_budget="1GiB") | key

    traffic = planned_of(tmp_path, "Wide", "--nproc-per-node 2 --collective 10GB", config)["step"]["traffic"]

    weights = 12 * (8 << 20)
    # The parameters are gathered once, after the update. The root has none here.
    assert traffic["collectives"] == reductions * (weights // 2 if key else weights) + weights
    assert traffic["collective_calls"] == (reductions + 1) * 12


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
    options = "--device cpu --nproc-per-node 2 --collective 10GB"

    def spilled(stage: int, micro_batches: int) -> int:
        config = wide(stage, ("device", "nvme"), micro_batches)
        config["paramserver"]["placement"]["gradients"] = "nvme"
        config["gradient_clipping"] = 1.0
        found = planned_of(tmp_path, "Wide", options, config)
        nbytes: int = found["step"]["traffic"]["nvme_written"] - found["store"]["updated_bytes"]
        return nbytes

    weights = 12 * (8 << 20)
    assert spilled(1, 1) == spilled(1, 4) == spilled(2, 1) == weights
    assert spilled(2, 4) == 4 * weights


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

    weights = 12 * (8 << 20)
    assert traffic["put"] == pytest.approx(put * weights)
    assert traffic["nvme_written"] == pytest.approx(written * weights)


def line(found: dict[str, Any], what: str) -> int:
    """Return the bytes of a line of a rank's memory; 0 if there is no such line."""
    return sum(one["nbytes"] for one in found["rank"]["lines"] if one["what"] == what)


def test_units_that_may_stay_gathered_take_memory(tmp_path: Path) -> None:
    def gathered(most: int) -> int:
        config = wide(3, ("nvme", "nvme"))
        config["zero_optimization"]["stage3_max_live_parameters"] = most
        return line(planned_of(tmp_path, "Wide", "", config), "gathered units")

    unit, elements = 8 << 20, 2 << 20
    # Without the key only the unit that computes is gathered, because the root has no parameters.
    assert [gathered(most) for most in (0, 5 * elements, 10**9)] == [unit, 5 * unit, 12 * unit]


def test_gradients_on_their_way_to_the_store_take_memory_of_a_gpu(tmp_path: Path) -> None:
    def planned(micro_batches: int, **placement: str) -> dict[str, Any]:
        config = wide(2, ("device", "host"), micro_batches)
        config["paramserver"]["placement"] |= placement
        return planned_of(tmp_path, "Wide", "", config)

    once, several = planned(1), planned(4)
    weights = 12 * (8 << 20)

    assert line(once, "gradients between micro-batches") == 0
    assert line(several, "gradients between micro-batches") == weights
    # The pass itself takes less where the sums are counted apart.
    assert 0 < line(several, "activations and gradients") < line(once, "activations and gradients")
    assert line(planned(4, gradients="device"), "gradients between micro-batches") == weights


def test_the_only_pass_of_a_step_reduces_each_unit_at_any_stage(tmp_path: Path) -> None:
    def gradients(stage: int, micro_batches: int) -> int:
        config = wide(stage, ("device", "host"), micro_batches)
        found = planned_of(tmp_path, "Wide", "--nproc-per-node 2 --collective 10GB", config)
        return line(found, "activations and gradients") + line(found, "gradients between micro-batches")

    # With several passes, stage 1 keeps the whole gradients of all twelve units until the last one.
    assert gradients(1, 1) == gradients(2, 1) < gradients(2, 4) < 12 * (8 << 20) < gradients(1, 4)


@pytest.mark.parametrize(
    ("homes", "options", "slots"),
    [
        (("nvme", "nvme"), "", 2),
        (("device", "host"), "", 0),
        (("device", "host"), "--nproc-per-node 2 --collective 10GB", 2),
        (("nvme", "nvme"), "--nproc-per-node 2 --collective 10GB --device cpu", 0),
    ],
)
def test_units_pass_through_two_slots_of_a_gpu(
    tmp_path: Path, homes: tuple[str, str], options: str, slots: int
) -> None:
    assert line(planned_of(tmp_path, "Wide", options, wide(3, homes)), "staging slots") == slots * (8 << 20)
    assert line(planned_of(tmp_path, "Wide", options, wide(2, ("device", "host"))), "staging slots") == 0


def test_a_gather_from_the_store_fills_a_slot_with_one_part(tmp_path: Path) -> None:
    found = planned_of(
        tmp_path, "Wide", "--nproc-per-node 4 --collective 10GB", wide(3, ("nvme", "nvme"), gather="store")
    )

    assert line(found, "staging slots") == 2 * (2 << 20)


def test_the_gradients_of_four_units_may_wait_on_a_gpu_for_their_copy(tmp_path: Path) -> None:
    def waiting(homes: tuple[str, str], micro_batches: int = 1, options: str = "") -> int:
        found = planned_of(tmp_path, "Wide", options, wide(2, homes, micro_batches))
        return line(found, "gradients on their way")

    unit = 8 << 20
    assert waiting(("device", "host")) == 4 * unit
    assert waiting(("device", "host"), options="--nproc-per-node 2 --collective 10GB") == 2 * unit
    # Sums that stay until the last pass are counted whole, and those at home on the device do not leave.
    assert waiting(("device", "host"), micro_batches=2) == waiting(("device", "device")) == 0
    assert waiting(("device", "host"), options="--device cpu") == 0


def test_parameters_that_a_device_has_updated_for_the_store_take_its_memory(tmp_path: Path) -> None:
    def updating(parameters: str, optimizer: str, **keys: Any) -> int:
        return line(planned_of(tmp_path, "Wide", "", wide(3, (parameters, optimizer)) | keys), "update on the device")

    weights, unit = 12 * (8 << 20), 8 << 20
    assert [updating("device", "device"), updating("nvme", "host"), updating("nvme", "device")] == [0, 0, weights]
    # In bf16 the gradient of one unit is fp32 for its update.
    assert updating("host", "device", bf16={"enabled": True}) == weights // 2 + unit


def test_floating_point_inputs_are_in_the_dtype_of_the_parameters_as_in_a_run(tmp_path: Path) -> None:
    def activations(**keys: Any) -> int:
        found = planned_of(tmp_path, "Wide", "--tokens 8192", wide(2, ("device", "device")) | keys)
        return line(found, "activations and gradients")

    assert activations(bf16={"enabled": True}) == pytest.approx(activations() / 2, rel=0.01)


@pytest.mark.parametrize(("device", "copies"), [("cuda", 1), ("cpu", 3)])
def test_gradients_that_are_reduced_in_another_dtype_are_copied(tmp_path: Path, device: str, copies: int) -> None:
    def collectives(stage: int, **keys: Any) -> int:
        options = f"--nproc-per-node 2 --collective 10GB --device {device}"
        config = wide(stage, ("device", "host")) | {"bf16": {"enabled": True}} | keys
        return line(planned_of(tmp_path, "Wide", options, config), "collectives")

    wide_unit, narrow_unit = 8 << 20, 4 << 20
    alike, wider = collectives(2), collectives(2, communication_data_type="fp32")
    # On the CPU, gloo keeps two copies of a gradient, and two of the parameters.
    assert alike == (4 * narrow_unit if device == "cpu" else 0)
    assert wider - alike == copies * wide_unit - (2 * narrow_unit if device == "cpu" else 0)


def test_autocast_makes_activations_smaller(tmp_path: Path) -> None:
    def activations(**keys: Any) -> int:
        found = planned_of(tmp_path, "Wide", "--tokens 8192", wide(2, ("device", "device")) | keys)
        return line(found, "activations and gradients") - 12 * (8 << 20)

    plain, under_autocast = activations(), activations(torch_autocast={"enabled": True, "dtype": "bfloat16"})

    assert 0.4 * plain < under_autocast < 0.75 * plain


def test_a_gather_from_the_store_reads_all_partitions_over_the_link(tmp_path: Path) -> None:
    ranks = "--nproc-per-node 4 --collective 10GB"

    def traffic(gather: str, options: str = "") -> dict[str, Any]:
        config = wide(3, ("host", "host"), host_budget="1GiB", gather=gather)
        found: dict[str, Any] = planned_of(tmp_path, "Wide", f"{ranks} {options}", config)["step"]["traffic"]
        return found

    weights = 12 * (8 << 20)
    collective, store = traffic("auto"), traffic("store")
    assert store["to_rank"] == 4 * collective["to_rank"] > 0
    # Only gradients are reduced.
    assert (store["collectives"], store["collective_calls"]) == (weights, 12)
    assert collective["collectives"] == weights + store["to_rank"]
    on_cpu = traffic("collective", "--device cpu")
    assert (on_cpu["mapped"], on_cpu["collectives"]) == (0, collective["collectives"])
    assert traffic("auto", "--device cpu")["mapped"] == weights


def test_a_gather_from_the_store_is_refused_where_a_run_refuses_it(tmp_path: Path) -> None:
    result = plan(tmp_path, f"{MACHINE} {LINKS}", wide(3, ("device", "host"), gather="store"))

    assert result.exit_code == 2
    assert 'paramserver.gather = "store"' in result.stderr


def test_suggested_budgets_keep_all_gradients_in_host_memory(tmp_path: Path) -> None:
    def planned(options: str) -> dict[str, Any]:
        arguments = [f"{__name__}:Wide", "--inputs", f"{__name__}:rows", "--json", "--tokens", "16", *options.split()]
        arguments += ["--config", str(tmp_path / "training.json")]
        result = CliRunner().invoke(app, arguments, obj=(find_need, find_hits), catch_exceptions=False)
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    config = wide(3, ("nvme", "nvme"))
    del config["paramserver"]["nvme_budget"]
    (tmp_path / "training.json").write_text(json.dumps(config))

    suggested = planned("--node h100x8 --no-search")
    ample, large = suggested["store"]["ample_host_budget"], planned("--node h100x8 --host-budget 8GiB --no-search")

    assert suggested["store"]["spilled_gradient_bytes"] == 0
    assert ample < suggested["store"]["host_budget"] < ample + 1.1 * suggested["store"]["passing_bytes"]
    # The parameters that pass stay, too; a larger budget would save reads of states.
    assert suggested["step"]["traffic"]["hit"] == 1.0
    written = suggested["store"]["updated_bytes"]
    assert suggested["step"]["traffic"]["nvme_written"] == large["step"]["traffic"]["nvme_written"] == written
    spilled = [
        planned(f"--node h100x8 --no-search --host-budget {budget} --nvme-budget 8GiB")["store"][
            "spilled_gradient_bytes"
        ]
        for budget in (ample - (1 << 20), ample)
    ]
    assert spilled[0] > 0 == spilled[1]


@pytest.mark.parametrize(("option", "used"), [("", "far/nvme"), ("--dir near", "near")])
def test_the_directory_is_that_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, used: str
) -> None:
    asked: list[Path] = []

    def capacities(directory: Path, ranks: int) -> Capacities:
        asked.append(directory)
        return Capacities(device=0, host=0, nvme=0, is_cpu=True)

    monkeypatch.setattr("trainer_client.plan.cli.capacities_here", capacities)
    config = wide(3, ("nvme", "nvme"))
    del config["paramserver"]["placement"]
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": "far/nvme"}

    found = planned_of(tmp_path, "Wide", option, config)

    assert asked == [Path(used)]
    assert found["assumptions"][-1] == f"Where it is not given, NVMe is that of the file system of {used}."


@pytest.mark.parametrize("zero", [True, {"stage": "auto"}, {"stage": 2, "cpu_offload": True}], ids=str)
def test_older_and_automatic_values_are_understood_by_the_search(tmp_path: Path, zero: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}

    result = plan(tmp_path, f"{MACHINE.replace('--hbm 8GiB', '--hbm 1KiB')} {LINKS}", config)

    assert (result.exit_code, type(result.exception)) == (3, SystemExit)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Wide()


def test_a_model_that_is_built_on_the_meta_device_is_planned_like_another(tmp_path: Path) -> None:
    config = wide(2, ("device", "host"))

    found, usual = (planned_of(tmp_path, model, "", config) for model in ("on_meta", "Wide"))

    assert found == usual


def test_states_for_which_the_host_budget_has_room_are_not_read(tmp_path: Path) -> None:
    def traffic(budget: int) -> tuple[dict[str, Any], dict[str, Any]]:
        options = f"{MACHINE} {LINKS} --tokens 16 --no-search --json --host-budget {budget}"
        found = json.loads(plan(tmp_path, options).stdout)
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
        found: dict[str, Any] = json.loads(plan(tmp_path, f"{MACHINE} {LINKS} --no-search --json", config).stdout)
        return found

    def copies(found: dict[str, Any]) -> int:
        return sum(line["nbytes"] for line in found["rank"]["lines"] if line["what"] == "copies of parameters")

    without, part, whole = planned("0"), planned("200KiB"), planned("1GiB")

    assert [copies(found) for found in (without, part)] == [0, 200 << 10]
    assert 4 * whole["parameters"] <= copies(whole) < 4 * whole["parameters"] + 512 * 8
    hits = [found["step"]["traffic"]["device_hit"] for found in (without, part, whole)]
    # The root and the last block are read once in each of four micro-batches, the first block twice.
    assert 0.0 == hits[0] < hits[1] < hits[2] < 1.0
    read, *less = (found["step"]["traffic"]["to_rank"] for found in (without, part, whole))
    assert [found / read for found in less] == pytest.approx([1.0 - hit for hit in hits[1:]], abs=0.01)


def test_states_of_a_device_are_written_before_the_rank_goes_on(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    machine = MACHINE.replace("--device cuda --hbm 8GiB", "--device cpu")
    found = json.loads(plan(tmp_path, f"{machine} --flops 1e13 --tokens 16 --no-search --json", config).stdout)

    step = found["step"]
    # The parameters and two states of AdamW, in fp32.
    assert step["traffic"]["put"] >= 12 * found["parameters"]
    assert step["resources"]["hand_over"] == step["traffic"]["put"] / 2e9
    serial = ("compute", "hand_over", "device_update", "trainer_copies", "store_processor")
    assert step["seconds"] == pytest.approx(sum(step["resources"][name] for name in serial))


def test_what_does_not_fit_is_named_with_a_change_that_helps(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        "paramserver": {"placement": {"optimizer": "nvme"}, "nvme_budget": "1MiB"},
    }

    found = json.loads(plan(tmp_path, f"{MACHINE} {LINKS} --no-search --json", config).stdout)
    assert [one["key"] for one in found["shortages"]] == ["paramserver.nvme_budget"]
    assert found["change"]["what"] == "set the budgets of the store"

    small = MACHINE.replace("--hbm 8GiB", "--hbm 1MiB")
    result = plan(tmp_path, f"{small} {LINKS} --no-search", config)
    assert result.exit_code == 3
    assert "It does not fit: memory of a device" in result.stdout
    assert "No change that was tried makes it fit" in result.stdout


def test_more_nodes_are_tried_with_the_samples_of_each_rank(tmp_path: Path) -> None:
    config = wide(3, ("nvme", "nvme"), micro_batches=2)
    config["train_batch_size"] = 6
    del config["train_micro_batch_size_per_gpu"]

    # On one node, two versions of weights and states take 576 MiB; on two nodes, three versions of a half 432 MiB.
    found = planned_of(tmp_path, "Wide", "--nvme-capacity 500MiB", config)

    assert not found["fits"]
    assert found["change"]["what"] == "2 nodes, with this config"
    changed = found["change"]["config"]
    assert (changed["train_micro_batch_size_per_gpu"], changed["gradient_accumulation_steps"]) == (3, 2)
    assert "train_batch_size" not in changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--no-probe --device cpu", "measures nothing: give --nvme-read, --nvme-write, --flops, too"),
        ("--device tpu", "write cpu or cuda"),
        (f"{MACHINE} {LINKS} --nproc-per-node 2", "give --collective, too"),
        (
            f"{MACHINE.replace('--no-probe --device cuda', '--device cpu')} --flops 1e13 --nnodes 2",
            "--nnodes 2: this machine cannot measure the network between nodes: give --collective, too",
        ),
        (f"{MACHINE} {LINKS} --inputs nowhere:batch", "--inputs nowhere:batch"),
        (MACHINE.replace("8GiB", "much") + f" {LINKS}", "--hbm 'much' is not a size"),
        (MACHINE.replace("16GiB", "x") + f" {LINKS}", "--host-memory 'x' is not a size"),
        (f"{MACHINE} {LINKS} --inputs json:__name__", "--inputs json:__name__ is a str"),
        (f"{MACHINE} {LINKS} --inputs builtins:max", "--inputs builtins:max returns no mapping"),
        (f"{MACHINE} {LINKS} --inputs operator:getitem", "--inputs operator:getitem has raised TypeError"),
        (f"{MACHINE} --device-link 20GB --flops 0", "--flops 0 is not a rate"),
        (f"{MACHINE} --device-link 20GB --flops -1", "--flops -1 is not a rate"),
        (f"{MACHINE} --device-link 20GB --flops nan", "--flops nan is not a rate"),
        (MACHINE.replace("4GB", "0") + f" {LINKS}", "--nvme-read '0' is not a size above 0"),
        (f"{MACHINE} {LINKS} --nproc-per-node 2 --collective 0", "--collective '0' is not a size above 0"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: str, message: str) -> None:
    result = plan(tmp_path, options)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt2", "'gpt2' is no model"),
        ("nowhere:build", "No module named 'nowhere'"),
        ("json:dumps", "the model cannot be built"),
        ("collections:Counter", "not a torch.nn.Module"),
        ("/missing.json", "there is no /missing.json"),
    ],
)
def test_what_is_no_model_is_named(model: str, message: str) -> None:
    result = CliRunner().invoke(app, [model, *f"{MACHINE} {LINKS}".split()], obj=(find_need, find_hits))

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_inputs_may_be_made_by_a_module_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The console script's own path does not have the working directory.
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs_of_this_test.py").write_text(
        "import torch\n\n\ndef words(samples, tokens):\n"
        "    ids = torch.zeros(samples, tokens, dtype=torch.int64)\n    return {'input_ids': ids, 'labels': ids}\n"
    )

    result = plan(tmp_path, f"{MACHINE} {LINKS} --tokens 16 --no-search --inputs inputs_of_this_test:words")

    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("code", "source", "message"),
    [
        ("raise ValueError('no data here')", "failing_model:build", "raises ValueError: no data here"),
        ("raise SystemExit(2)", "failing_model:build", "raises SystemExit: 2"),
        ("", ":build", "':build' names no object of a module"),
        ("", "failing_model:", "'failing_model:' names no object of a module"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, source: str, message: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_model", raising=False)
    (tmp_path / "failing_model.py").write_text(code)

    for arguments in ([source], [str(tmp_path), "--inputs", source]):
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        result = CliRunner().invoke(app, [*arguments, *f"{MACHINE} {LINKS}".split()], obj=(find_need, find_hits))

        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


def test_a_config_that_training_would_refuse_is_refused(tmp_path: Path) -> None:
    result = plan(tmp_path, f"{MACHINE} {LINKS}", {"train_micro_batch_size_per_gpu": 1, "zero_optimisation": {}})

    assert result.exit_code == 2
    assert "zero_optimization" in result.stderr


def test_a_config_without_the_optimizer_that_a_script_passes_says_what_to_write(tmp_path: Path) -> None:
    result = plan(tmp_path, f"{MACHINE} {LINKS}", {"train_micro_batch_size_per_gpu": 1})

    assert result.exit_code == 2
    assert 'for the plan, as in {"optimizer": {"type": "AdamW"}}' in result.stderr


def test_a_job_that_a_store_would_refuse_is_refused(tmp_path: Path) -> None:
    result = plan(tmp_path, f"{MACHINE} {LINKS}", wide(3, ("nvme", "nvme"), job="two\nlines"))

    assert result.exit_code == 2
    assert "a store would refuse the job: job must be 1 to 1024 bytes of printable text" in result.stderr


def test_a_config_for_an_operators_daemon_and_a_collector_is_planned(tmp_path: Path) -> None:
    config = wide(3, ("nvme", "nvme"), address="10.0.0.1:7411", token_file="token", insecure=True)
    del config["paramserver"]["nvme_budget"]
    config["paramserver"]["telemetry"] = "http://collector.example:4317"

    assert planned_of(tmp_path, "Wide", "", config)["fits"]


def test_replicas_are_said_to_need_more_than_the_plan_has(tmp_path: Path) -> None:
    def notes(**section: Any) -> list[str]:
        found = planned_of(tmp_path, "Wide", "", wide(3, ("nvme", "nvme"), **section))
        return [note for note in found["assumptions"] if "replicas" in note]

    (note,) = notes(replicas=1, replica={"addresses": ["10.0.0.5:7411"]})
    assert "each holder needs the room that the store of a node has here once more" in note
    assert notes() == []


def test_a_rank_on_the_cpu_has_a_share_of_the_host_memory_that_is_given(tmp_path: Path) -> None:
    found = planned_of(tmp_path, "Wide", "--device cpu --nproc-per-node 4 --collective 10GB", wide(3, ("nvme", "nvme")))

    assert (found["capacities"]["device"], found["capacities"]["host"]) == (4 << 30, 16 << 30)


@pytest.mark.parametrize("name", ["[red]new[/data]", ":smile:", "x" * 300])
def test_a_directory_of_any_name_is_printed_as_it_is(tmp_path: Path, name: str) -> None:
    """The kernel refuses to look at the last one, as it refuses what is in a directory of another user."""
    result = plan(tmp_path, f"{MACHINE} {LINKS} --no-search --tokens 16 --dir {tmp_path}/{name}")

    assert result.exit_code == 0, result.output
    assert f"NVMeisthatofthefilesystemof{tmp_path}/{name}." in "".join(result.stdout.split())
