"""The file of a trace has the form that trace viewers read: complete events in named rows, without overlaps in one."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from trainer_client.base.recorder import TraceSpan
from trainer_client.training.report.perfetto import Process, write_trace

SPANS = [
    TraceSpan(row="nvme read", name="a", began=1.0, ended=3.0, nbytes=4096),
    TraceSpan(row="nvme read", name="b", began=2.0, ended=4.0),
    TraceSpan(row="nvme read", name="c", began=3.0, ended=5.0),
    TraceSpan(row="compute", name="forward", began=1.0, ended=1.5),
    TraceSpan(row="steps", name="step 3", began=1.0, ended=5.0),
]


def written(path: Path) -> list[dict[str, Any]]:
    processes = [Process(name="rank 0", spans=SPANS), Process(name="store", spans=SPANS[:1])]
    write_trace(path, processes, began=1.0, rows=["steps", "compute"])
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_every_event_has_its_time_and_its_named_row(tmp_path: Path) -> None:
    events = written(tmp_path / "step.json")
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]

    assert {event["ph"] for event in events} == {"X", "M"}
    assert len(complete) == len(SPANS) + 1
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["name"] for event in complete)
    assert {(event["pid"], event["tid"]) for event in complete} == rows.keys()
    assert [rows[1, tid] for tid in (1, 2, 3, 4)] == ["steps", "compute", "nvme read", "nvme read (2)"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "store"]
    read = next(event for event in complete if event["name"] == "a")
    assert (read["ts"], read["dur"], read["args"]) == (0.0, 2e6, {"bytes": 4096})


def test_events_of_one_row_do_not_overlap(tmp_path: Path) -> None:
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in written(tmp_path / "step.json"):
        if event["ph"] == "X":
            row = event["pid"], event["tid"]
            assert event["ts"] >= ends[row]
            ends[row] = event["ts"] + event["dur"]


def test_a_file_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    written(path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="no space"):
        written(path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"]
