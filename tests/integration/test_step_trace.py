"""The report and the trace of real steps: the counters equal the bytes that moved, and tracing changes no bit."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import (
    Run,
    assert_bit_equal,
    build_model,
    launch,
    make_optimizer,
    micro_batches,
    train_plain,
    train_through_store,
)
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError
from trainer_client.training.report.step_report import StepReport

# The two ends of a call read clocks in two processes, and JSON has microseconds.
SLACK_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class Rows:
    """A trace file that was read again: its spans (start, end, name) in seconds, by process and row. The lanes of a row
    are joined."""

    spans: dict[str, dict[str, list[tuple[float, float, str]]]]

    @classmethod
    def read(cls, path: Path) -> Rows:
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        spans: dict[str, dict[str, list[tuple[float, float, str]]]] = defaultdict(lambda: defaultdict(list))
        for event in events:
            if event["ph"] == "X":
                start = event["ts"] / 1e6
                row = (start, start + event["dur"] / 1e6, event["name"])
                spans[processes[event["pid"]]][event["cat"]].append(row)
        return cls(spans)

    def of(self, process: str) -> dict[str, list[tuple[float, float, str]]]:
        return next(rows for name, rows in self.spans.items() if name.startswith(process))


def traced_config(address: str, job: str, directory: Path, **trace: Any) -> dict[str, Any]:
    return config_of(address, job, "nvme", trace={"file": str(directory / "step.json"), **trace})


def reports(run: Run) -> list[StepReport]:
    model = build_model(run)
    optimizer, _ = make_optimizer(model, run)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=run.config)
    made = []
    with engine:
        assert engine.step_report() is None
        for batch in micro_batches(run.steps):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            engine.wait_for_commit()
            report = engine.step_report()
            assert report is not None
            made.append(report)
    return made


def test_a_trace_has_every_kind_of_row_within_its_steps_and_changes_no_bit(
    tmp_path: Path, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"host_budget": "128MiB", "nvme_budget": "1GiB"}
    with Daemon(tmp_path / "state", limits) as daemon:
        train_through_store(Run(steps=2, config=config_of(daemon.address, job, "nvme")))
        assert daemon.stop() == 0
    # A resumed run finds nothing in the memory of a new daemon, so its first step reads from disk.
    with Daemon(tmp_path / "state", limits) as daemon, caplog.at_level("INFO", logger="trainer_client"):
        run = Run(steps=6, config=traced_config(daemon.address, job, tmp_path, first_step=1, steps=2))
        traced = train_through_store(run)
    plain = train_plain(run)
    assert_bit_equal(replace(traced, resumed_step=0), replace(plain, losses=plain.losses[2:]))

    rows = Rows.read(tmp_path / "step.json")
    rank, store = rows.of("rank 0"), rows.of("store daemon")
    assert [name for _, _, name in rank["steps"]] == ["step 3", "step 4"]
    assert {name for _, _, name in rank["phases"]} >= {"forward", "backward", "step"}
    computed = {name for _, _, name in rank["compute"]}
    assert computed >= {f"{part} transformer.h.{unit}" for part in ("forward", "backward") for unit in range(3)}
    # The trainer waits for a commit only if that lasts longer than the forward after it.
    assert rank.keys() >= {"gathers", "fetches", "wait: fetch", "link: store to trainer"}
    assert store.keys() >= {"nvme read", "nvme write", "update", "optimizer", "commit", "sync"}
    assert store.keys() & {"demand fetch", "prefetch"}
    end = rank["steps"][-1][1]
    for process in rows.spans.values():
        for spans in process.values():
            assert all(-SLACK_SECONDS <= start <= stop <= end + SLACK_SECONDS for start, stop, _ in spans)
    assert f"the trace of step 3 to step 4 is in {tmp_path / 'step.json'}" in caplog.text


def test_each_rank_writes_a_file_of_its_own(model_store: str, job: str, tmp_path: Path) -> None:
    config = config_of(model_store, job, "nvme", gather="collective", trace=str(tmp_path / "step.json"))
    launch([Run(steps=5, config=config)], 2, tmp_path)

    for rank, name in enumerate(("step.json", "step.rank1.json")):
        rows = Rows.read(tmp_path / name).of(f"rank {rank}")
        assert [step for _, _, step in rows["steps"]] == ["step 3", "step 4"]
        assert rows.keys() >= {"wait: other ranks", "link: collectives"}


def test_a_run_that_ends_within_the_traced_steps_writes_those_that_it_made(
    model_store: str, job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_through_store(Run(steps=2, config=traced_config(model_store, job, tmp_path, first_step=1, steps=10)))
    assert [name for _, _, name in Rows.read(tmp_path / "step.json").of("rank 0")["steps"]] == ["step 1", "step 2"]

    later = traced_config(model_store, f"{job}-later", tmp_path / "later", first_step=9)
    (tmp_path / "later").mkdir()
    train_through_store(Run(steps=2, config=later))
    assert not (tmp_path / "later" / "step.json").exists()
    assert "the run made 2 steps, and paramserver.trace.first_step is 9" in caplog.text


def test_a_trace_without_a_directory_is_refused_before_anything_is_trained(
    model_store: str, job: str, tmp_path: Path
) -> None:
    config = config_of(model_store, job, "nvme", trace=str(tmp_path / "nowhere" / "step.json"))
    with pytest.raises(ConfigError, match=r"paramserver\.trace\.file = .*nowhere"):
        train_through_store(Run(steps=1, config=config))


def test_a_name_of_a_file_is_short_for_the_section() -> None:
    def trace(value: Any) -> Any:
        section = {"train_batch_size": 1, "paramserver": {"trace": value}}
        return load_config(section, {}).paramserver.trace

    assert trace("step.json") == trace({"file": "step.json", "first_step": 3, "steps": 2})
    with pytest.raises(ConfigError, match=r"paramserver\.trace\.steps"):
        trace({"file": "step.json", "steps": 0})


def test_a_report_has_the_bytes_that_a_step_moves_and_the_phases_that_it_has(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(model_store, job, "nvme") | {"steps_per_print": 2}
    with caplog.at_level("INFO", logger="trainer_client"):
        made = reports(Run(steps=6, config=config))

    for report in made:
        assert sum(report.phases.values()) == pytest.approx(report.seconds)
        assert {"forward", "backward", "step"} <= report.phases.keys()
        assert sum(report.stall_seconds.values()) <= report.seconds
        assert report.roofline_fraction > 0
        # The run is in fp32, so a gradient has 4 bytes per parameter. Each unit is gathered once or twice.
        assert report.bytes_per_parameter["trainer_to_store"] == pytest.approx(4.0, rel=0.02)
        assert 4.0 <= report.bytes_per_parameter["store_to_trainer"] <= 8.2
        assert report.gathers >= 4
    assert [report.step for report in made] == [1, 2, 3, 4, 5, 6]
    # Each step writes a weight and two moments, 12 bytes per parameter. It reads those that are no longer in host
    # memory: the moments once, and the weight for each gather and for the update, so up to three times, 20 bytes per
    # parameter. Writes that the store makes after the end of a step count for the next step, so the last step's may be
    # missing.
    written, read = (sum(report.bytes_per_parameter[f"nvme_{way}"] for report in made) for way in ("written", "read"))
    assert 5 * 12.0 <= written <= 6 * 12.2
    assert 0 <= read <= 6 * 20.4
    lines = [record.getMessage() for record in caplog.records if "roofline=" in record.getMessage()]
    assert [line.split()[0] for line in lines] == ["step=2", "step=4", "step=6"]
