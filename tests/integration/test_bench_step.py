"""The training benchmarks run with tiny models and without DeepSpeed, and their JSON has the promised figures. No test
here asserts a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import plots
from benchmarks.common import machine, report
from benchmarks.common.measure import BenchmarkError, Threads
from benchmarks.common.processes import Memory, Use
from benchmarks.training import beside, depth, scale
from benchmarks.training.bandwidth import REQUEST_BYTES, StepProbe
from benchmarks.training.contestant_process import Block, RunningContestant
from benchmarks.training.heat import Standing
from benchmarks.training.result import summaries
from benchmarks.training.task import TrainingTask

ROOT = Path(__file__).parents[2]
TASK = TrainingTask(layers=1, hidden=64, vocab=512, batch=1, tokens=10)
USE = Use(main_cpu_seconds=2.0, children_cpu_seconds=1.0, bytes_read=300, bytes_written=600)


def run(module: str, directory: Path, *options: str) -> dict[str, Any]:
    """Run a benchmark in its quick form and return the JSON object that it prints. Assert that it leaves no file in
    `directory`."""
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--json", "--dir", str(directory), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert list(directory.iterdir()) == []
    value: dict[str, Any] = json.loads(result.stdout)
    return value


@pytest.mark.bench
def test_a_heat_states_what_each_contestant_took_and_cost(tmp_path: Path) -> None:
    result = run("training.step", tmp_path, "--heat", "nvme", "--clip", "0.5")
    assert set(result) == {"machine", "provenance", "parameters", "heats", "targets"}
    assert result["parameters"]["clip"] == 0.5
    plain, nvme = (result["heats"]["nvme"][name] for name in ("plain", "nvme"))
    assert plain["losses"] == nvme["losses"] and len(plain["losses"]) == 4
    for figures in (plain, nvme):
        assert figures["not_run"] is None
        # Each round has two steps, and the first of them does not count. Round 0 is the warm-up.
        assert len(figures["steps"]) == 1 and len(figures["ratios"]) == 1
        assert figures["memory"]["trainer"] > 0 and figures["cpu_per_step"]["trainer"] > 0
    assert plain["ratio"] == 1.0 and plain["roofline"]["io"] is None
    assert nvme["memory"]["daemon"] > 32 << 20, "the arena is in host memory"
    # Each step writes new master weights, two moments and the bf16 parameters.
    assert nvme["written_per_step"] >= 14 * result["parameters"]["parameters"]
    assert nvme["roofline"]["io"] > 0 and nvme["roofline"]["seconds"] >= plain["median"]
    assert [target["name"] for target in result["targets"]] == [
        "nvme: step / max(plain PyTorch's, I/O roofline)",
        "nvme: memory / plain PyTorch's",
    ]


@pytest.mark.bench
def test_a_commit_is_compared_with_itself(tmp_path: Path) -> None:
    """The earlier commit is HEAD, so the losses are the same, and each contestant has a pair of turns."""
    result = run("training.beside", tmp_path, "HEAD", "--rounds", "1", "--heat", "device")
    assert set(result["contestants"]) == {"device: plain", "device: host, durable", "device: device"}
    for figures in result["contestants"].values():
        assert len(figures["seconds"]) == len(figures["earlier_seconds"]) == 1
        # One pair has a median, and no interval.
        assert all(len(figures[ratio]) == 1 for ratio in beside.RATIOS)
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "beside-" not in listed.stdout


def test_both_commits_train_the_same_size_and_their_ratio_has_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of this commit takes 1.1 to 2.1 times as long, and once 40 times, because the machine was busy."""
    times = [value for number in range(12) for value in (1.0, 1.1 + number / 10 if number < 11 else 40.0)]
    asked: list[Sequence[str]] = []

    def turn(_tree: Path, _directory: Path, _heats: Sequence[str], options: Sequence[str]) -> dict[str, dict[str, Any]]:
        asked.append(options)
        return {"host: host": {"losses": [1.0], "median": times.pop(0), "ratio": 1.0, "memory": {"total": 8}}}

    results: list[dict[str, Any]] = []
    monkeypatch.setattr(beside, "turn", turn)
    monkeypatch.setattr(beside, "checked_out", lambda _: nullcontext(ROOT))
    monkeypatch.setattr(report, "run", lambda *arguments, **_: results.append(arguments[3]()))
    asking = ["HEAD", "--layers", "2", "--hidden", "128", "--batch", "3", "--tokens", "9", "--steps", "5"]
    assert CliRunner().invoke(beside.app, asking).exit_code == 0

    (result,) = results
    assert asked == [asking[1:]] * 24
    assert result["contestants"]["host: host"]["ratio"] == [1.65, 1.3, 2.0]
    assert "| 1.000 | 1.650 | 1.650 (1.300 to 2.000) | 1.000 (1.000 to 1.000) |" in beside.markdown(result)


def block(*seconds: float, losses: list[float] | None = None) -> Block:
    values = list(seconds)
    return Block(
        seconds=values,
        forward=values,
        backward=values,
        update=values,
        losses=[] if losses is None else losses,
        settle_seconds=0.0,
        facts={},
        use=USE,
    )


def standing(name: str, kind: str, blocks: list[Block], losses: list[float]) -> Standing:
    return Standing(
        entry=RunningContestant(name=name, kind=kind), blocks=blocks, losses=losses, memory=Memory(main=30, children=10)
    )


def test_ratios_are_of_the_same_round_and_the_first_step_of_a_block_does_not_count() -> None:
    plain = standing("plain", "plain", [block(9, 1, 1), block(9, 2, 2), block(9, 4, 4)], [1.0])
    other = standing("host", "ours", [block(9, 2, 2), block(9, 2, 2), block(9, 2, 2)], [1.0])
    figures = summaries([plain, other], TASK)["host"]
    assert figures["steps"] == [2] * 6
    assert figures["ratios"] == [2.0, 1.0, 0.5] and figures["ratio"] == 1.0
    assert figures["tokens_per_second"] == 5.0
    assert (figures["read_per_step"], figures["written_per_step"]) == (100, 200)
    assert figures["roofline"]["compute"] == 2.0 and figures["roofline"]["fraction"] == 1.0


def test_losses_that_are_not_those_of_plain_pytorch_fail_the_benchmark() -> None:
    plain = standing("plain", "plain", [block(1, 1)], [1.0, 0.5])
    with pytest.raises(BenchmarkError, match="host: its losses are not those of plain PyTorch"):
        summaries([plain, standing("host", "ours", [block(1, 1)], [1.0, 0.5000001])], TASK)


def test_deepspeed_may_differ_a_little_and_else_does_not_count() -> None:
    plain = standing("plain", "plain", [block(1, 1)], [1.0, 0.5])
    near = standing("near", "deepspeed", [block(1, 1)], [1.0, 0.51])
    far = standing("far", "deepspeed", [block(1, 1)], [1.0, 0.6])
    absent = Standing(entry=RunningContestant(name="absent", kind="deepspeed"), not_run="no compiler")
    found = summaries([plain, near, far, absent], TASK)
    assert found["near"]["not_run"] is None and found["near"]["loss_difference"] == pytest.approx(0.01)
    assert "differ" in found["far"]["not_run"]
    assert found["absent"] == {"not_run": "no compiler"}


def test_the_probe_moves_whole_requests_and_leaves_nothing(tmp_path: Path) -> None:
    with StepProbe(tmp_path, REQUEST_BYTES + 1, 1, Threads(read=2, write=1)) as probe:
        assert probe.nbytes == 3 * REQUEST_BYTES
        assert probe.run() > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bench
def test_cost_by_size_is_a_table_and_a_plot(tmp_path: Path) -> None:
    plain = standing("compute", "compute", [block(1, 1)], [1.0])
    nvme = standing("nvme", "ours", [block(3, 3)], [2.0])
    about = {"layers": 1, "hidden": 64, "host_budget_bytes": 1 << 30}
    sizes = [about | {"parameters": millions * 10**6} | summaries([plain, nvme], TASK) for millions in (1, 2)]
    growth = {"seconds": 0.5, "memory": 0.5}
    result = {"parameters": {"batch": 1, "tokens": 8, "precision": "bf16"}, "sizes": sizes, "growth": growth}
    result |= {"machine": machine.describe(tmp_path), "provenance": machine.provenance()}
    assert "| 1 x 64 | 2 M | 1.00 | 3.00 | 1.00 | 0.00 | 0.33 |" in scale.markdown(result)
    for name in ("first.svg", "second.svg"):
        plots.draw("scale", result, tmp_path / name)
    assert "roofline" in (tmp_path / "first.svg").read_text()
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_the_largest_model_has_a_budget_of_4_gib_and_1_3_billion_parameters() -> None:
    largest = scale.FULL[-1]
    assert 1.30e9 < largest.gpt2_parameters < 1.32e9
    assert 3.95 * 2**30 < scale.host_budget_bytes(largest) < 4.05 * 2**30
    assert TrainingTask(layers=12, hidden=1024, vocab=512, batch=4, tokens=256).gpt2_parameters == 151_943_168


@pytest.mark.bench
def test_a_step_writes_the_bytes_that_are_expected(tmp_path: Path) -> None:
    result = run("training.costs", tmp_path)
    for name, figures in result["choices"].items():
        # The gradient of the root is read before it leaves host memory.
        assert 0.9 * result["expected_written"][name] < figures["nvme_written"] < result["expected_written"][name] + 0.2
    lent = result["choices"]["lent memory"]
    assert lent["lent_read"] > lent["nvme_read"]


def test_the_cases_of_the_depths_that_are_not_measured_anew_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "KEPT", tmp_path / "depth.json")
    chosen = depth._chosen([1.0], [4])
    assert depth._kept_cases(depth.FULL_BUDGET, None, chosen) == {}
    cases = [{"clip": clip, "accumulation": accumulation} for clip, accumulation in depth.CASES]
    kept = {"host_budget_bytes": depth.FULL_BUDGET, "memory_limit_bytes": None, "provenance": "then", "cases": cases}
    depth.KEPT.write_text(json.dumps(kept))

    found = depth._kept_cases(depth.FULL_BUDGET, None, chosen)

    assert list(found) == [(0.0, 1), (1.0, 1), (0.0, 4)]
    assert all(case["provenance"] == "then" for case in found.values())
    assert depth._kept_cases(depth.FULL_BUDGET, 3 << 30, chosen) == {}
