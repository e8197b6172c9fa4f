"""`paramserver plan` says whether a job fits and what would make it fit, and names options that cannot be honoured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.trainer_client.plan.plans import GPT2, LINKS, MACHINE, plan, planned_of, run, wide
from trainer_client.errors import ConfigError
from trainer_client.plan.machine import Capacities
from trainer_client.plan.model_inputs import make_batch


def test_a_plan_for_another_machine_needs_no_probe(tmp_path: Path) -> None:
    result = plan(tmp_path, f"{MACHINE} {LINKS} --tokens 16 --json")

    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"] and found["parameters"] == 121_344
    step, best = found["step"], found["best"]
    assert step["traffic"]["nvme_written"] == found["store"]["written_bytes"]
    assert step["resources"]["nvme"] >= step["traffic"]["nvme_written"] / 2e9
    assert step["overlapped_seconds"] == step["resources"][step["binding"]] == max(step["resources"].values())
    assert step["serial_seconds"] == pytest.approx(sum(step["resources"].values()))
    middles = [one["overlapped_seconds"] + one["serial_seconds"] for one in (best, step)]
    assert middles[0] <= middles[1]


def test_both_bounds_of_a_step_are_printed(tmp_path: Path) -> None:
    printed = plan(tmp_path, f"{MACHINE} {LINKS} --tokens 16 --no-search").stdout
    step = planned_of(tmp_path, None)["step"]

    bounds = [f"{step[name]:.3f} s if" for name in ("overlapped_seconds", "serial_seconds")]
    text = f"A step takes {bounds[0]} everything overlaps, {bounds[1]} nothing does; nvme takes longest."
    assert text in " ".join(printed.split())


def test_suggested_budgets_keep_all_gradients_in_host_memory(tmp_path: Path) -> None:
    config = wide(3, ("nvme", "nvme"))
    del config["paramserver"]["nvme_budget"]

    def planned(options: str) -> dict[str, Any]:
        return planned_of(tmp_path, "Wide", options, config, machine="--node h100x8")

    suggested, large = planned(""), planned("--host-budget 8GiB")
    ample = suggested["store"]["ample_host_budget"]

    assert suggested["store"]["spilled_gradient_bytes"] == 0
    assert ample < suggested["store"]["host_budget"] < ample + 1.1 * suggested["store"]["passing_bytes"]
    # The parameters that pass stay, too; a larger budget would save reads of states.
    assert suggested["step"]["traffic"]["hit"] == 1.0
    written = suggested["store"]["updated_bytes"]
    assert suggested["step"]["traffic"]["nvme_written"] == large["step"]["traffic"]["nvme_written"] == written
    spilled = [
        planned(f"--host-budget {budget} --nvme-budget 8GiB")["store"]["spilled_gradient_bytes"]
        for budget in (ample - (1 << 20), ample)
    ]
    assert spilled[0] > 0 == spilled[1]


def test_what_does_not_fit_is_named_with_a_change_that_helps(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        "paramserver": {"placement": {"optimizer": "nvme"}, "nvme_budget": "1MiB"},
    }

    found = planned_of(tmp_path, None, "", config)
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


def test_a_model_that_is_built_on_the_meta_device_is_planned_like_another(tmp_path: Path) -> None:
    config = wide(2, ("device", "host"))

    found, usual = (planned_of(tmp_path, model, "", config) for model in ("on_meta", "Wide"))

    assert found == usual


@pytest.mark.parametrize("zero", [True, {"stage": "auto"}, {"stage": 2, "cpu_offload": True}], ids=str)
def test_older_and_automatic_values_are_understood_by_the_search(tmp_path: Path, zero: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}

    result = plan(tmp_path, f"{MACHINE.replace('--hbm 8GiB', '--hbm 1KiB')} {LINKS}", config)

    assert (result.exit_code, type(result.exception)) == (3, SystemExit)


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


def test_a_rank_on_the_cpu_has_a_share_of_the_host_memory_that_is_given(tmp_path: Path) -> None:
    found = planned_of(tmp_path, "Wide", "--device cpu --nproc-per-node 4 --collective 10GB", wide(3, ("nvme", "nvme")))

    assert (found["capacities"]["device"], found["capacities"]["host"]) == (4 << 30, 16 << 30)


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


def test_a_gather_from_the_store_is_refused_where_a_run_refuses_it(tmp_path: Path) -> None:
    result = plan(tmp_path, f"{MACHINE} {LINKS}", wide(3, ("device", "host"), gather="store"))

    assert result.exit_code == 2
    assert 'paramserver.gather = "store"' in result.stderr


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
    result = run(model, *f"{MACHINE} {LINKS}".split())

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_tokens_of_a_language_model_are_those_of_its_vocabulary() -> None:
    class Words(nn.Module):
        config = SimpleNamespace(vocab_size=5)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> None: ...

    assert make_batch(Words(), None)(1, 7)["input_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    with pytest.raises(ConfigError, match="give --inputs MODULE:CALLABLE"):
        make_batch(nn.Linear(1, 1), None)


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
        (tmp_path / "config.json").write_text(json.dumps(GPT2))
        result = run(*arguments, *f"{MACHINE} {LINKS}".split())

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


@pytest.mark.parametrize("name", ["[red]new[/data]", ":smile:", "x" * 300])
def test_a_directory_of_any_name_is_printed_as_it_is(tmp_path: Path, name: str) -> None:
    """The kernel refuses to look at the last one, as it refuses what is in a directory of another user."""
    result = plan(tmp_path, f"{MACHINE} {LINKS} --no-search --tokens 16 --dir {tmp_path}/{name}")

    assert result.exit_code == 0, result.output
    assert f"NVMeisthatofthefilesystemof{tmp_path}/{name}." in "".join(result.stdout.split())
