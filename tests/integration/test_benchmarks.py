"""The benchmarks run with tiny sizes, and their JSON has the promised figures. No test here asserts a speed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import report
from benchmarks.common.measure import Sample, median_interval
from benchmarks.common.measure import report as compare
from benchmarks.dataplane import transfers
from benchmarks.storage import fio
from benchmarks.storage.tiers import QUICK

ROOT = Path(__file__).parents[2]
SLAB_BYTES = sum(QUICK.tier.slabs)
STREAMED = QUICK.engine.streamed


def run(module: str, directory: Path | None, path: str | None = None) -> tuple[dict[str, Any], str]:
    """Run a benchmark in its quick form and return the JSON object that it prints, and its messages. Assert that it
    leaves no file in `directory`."""
    where = [] if directory is None else ["--dir", str(directory)]
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--json", *where],
        cwd=ROOT,
        env=os.environ | ({} if path is None else {"PATH": path}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert directory is None or list(directory.iterdir()) == []
    return json.loads(result.stdout), result.stderr


def assert_says_where_it_was_measured(result: dict[str, Any]) -> None:
    assert set(result["machine"]) == {"cpu", "cpu_count", "memory_bytes", "kernel", "file_system", "device"}
    assert set(result["provenance"]) == {"date", "git_commit", "python", "torch"}


# Measures nothing, with a file in a temporary directory, until it is ended.
ENDLESS = """
import sys, tempfile, time
from pathlib import Path
from benchmarks.common import report

def measure():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
        (Path(directory) / "file").touch()
        print("ready", flush=True)
        # A signal that comes right before a sleep does not shorten it, so these are short.
        while True:
            time.sleep(0.1)

report.run("none", "None", "bench-none", measure, str, directory=Path(sys.argv[1]), as_json=False, results=False)
"""


def test_a_benchmark_that_is_told_to_end_removes_its_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("with_fio", [True, False], ids=["with fio", "without fio"])
@pytest.mark.bench
def test_every_case_moves_the_bytes_that_it_states(tmp_path: Path, with_fio: bool) -> None:
    if with_fio and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    result, messages = run("storage.tiers", tmp_path, None if with_fio else str(tmp_path))
    assert_says_where_it_was_measured(result)
    assert (result["fio_version"] is not None) is with_fio
    assert (fio.HOW_TO_INSTALL in " ".join(messages.split())) is not with_fio

    moved = {name: case["ours"]["bytes"] for name, case in result["cases"].items()}
    tensor_bytes = moved.pop("write_tensors")
    assert [tensor_bytes] * 2 == [moved.pop("read_tensors"), moved.pop("read_tensors_in_order")]
    assert 4096 * QUICK.tier.tensors <= tensor_bytes[0] <= 65536 * QUICK.tier.tensors
    assert moved == {
        **{f"{way}_{size}": [QUICK.tier.sequential_bytes] for way in ("write", "read") for size in ("1mib", "4mib")},
        **{f"{way}_shards": [SLAB_BYTES] for way in ("write", "read")},
        "mixed": [QUICK.tier.sequential_bytes],
        "update_streaming": [STREAMED.read_bytes + STREAMED.written_bytes],
    }
    for case in result["cases"].values():
        assert case["ours"]["median_gb_per_second"] > 0 and case["ours"]["cpu_seconds_per_gb"] > 0
        assert (case["fio"] is not None) is with_fio and (case["ratio"] is not None) is with_fio
        # Each thread of fio moves whole blocks only, so fio may move fewer bytes than the benchmark.
        assert not with_fio or case["fio"]["bytes"][0] >= 0.9 * case["ours"]["bytes"][0]

    assert [entry["piece_bytes"] for entry in result["checksums"]] == [1 << 20, 4 << 20]
    assert all(entry["share_of_read_cpu"] > 0 for entry in result["checksums"])
    (commits,) = result["commits"]
    assert commits["slabs"] == QUICK.engine.slabs[0]
    assert all(commits[f"{part}_seconds"]["median"] > 0 for part in ("update", "commit", "catalog"))


@pytest.mark.bench
def test_the_data_plane_is_measured_on_one_node_and_against_tcp_and_beside_a_crowd() -> None:
    result, _ = run("dataplane.transfers", None)
    assert_says_where_it_was_measured(result)
    local, sizes = result["local"], transfers.QUICK["local"]
    for by_size in local["lease_latency"].values():
        assert [*by_size] == [str(mib) for mib in sizes["shard_mib"]]
        assert all(case["ratio"] > 0 for case in by_size.values())
    assert local["same_node"]["ratio"] > 0
    remote, sizes = result["remote"], transfers.QUICK["remote"]
    for name in ("read", "write"):
        assert remote[name]["ours"]["bytes"] == remote[name]["tcp"]["bytes"] == [sizes["size_bytes"]]
        assert remote[name]["ratio"] > 0
    crowd = remote["crowd"]
    assert crowd["idle_streams"] == sizes["idle_streams"]
    assert crowd["ratio"] > 0 and all(min(samples) > 0 for samples in crowd["private_bytes"].values())


def test_a_ratio_is_the_median_over_pairs_not_a_ratio_of_medians() -> None:
    def samples(*seconds: float) -> list[Sample]:
        return [Sample(nbytes=1000, seconds=s, cpu_seconds=0.0) for s in seconds]

    result = compare(samples(1, 2, 4), samples(2, 2, 2))
    assert result["ratios"] == [0.5, 1.0, 2.0]
    assert result["ratio"] == 1.0
    assert compare([], samples(1))["ratio"] is None


@pytest.mark.parametrize(
    ("count", "interval"), [(1, None), (5, None), (6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (12, (2, 9)), (20, (5, 14))]
)
def test_the_interval_of_a_median_is_that_of_the_tables(count: int, interval: tuple[int, int] | None) -> None:
    values = [7 * number % count for number in range(count)]

    assert median_interval(values) == interval


def test_a_run_replaces_its_own_section_of_the_results_only(tmp_path: Path) -> None:
    result = {
        "machine": {
            "cpu": "C",
            "cpu_count": 2,
            "memory_bytes": 1 << 30,
            "kernel": "6",
            "file_system": "f",
            "device": "d",
        },
        "provenance": {"date": "today", "git_commit": None, "python": "3", "torch": "2"},
    }
    for name, body in (("storage", "old"), ("dataplane", r"kept \1"), ("storage", r"new \g<0>")):
        report.store(name, name.title(), result, body, f"make bench-{name}", tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith(report.INTRODUCTION)
    assert "old" not in text and "kept \\1" in text and "new \\g<0>" in text
    assert (text.index("## Storage"), text.count("## ")) == (text.index("## "), 2)
    assert json.loads((tmp_path / "results" / "dataplane.json").read_text()) == result
