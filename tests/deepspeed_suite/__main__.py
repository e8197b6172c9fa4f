"""The yardstick as a command: `python -m tests.deepspeed_suite DIR`, where DIR is a checkout of DeepSpeed.

Prints the results by file while they come, then those of all files and the failures by cause; with `--json FILE`, all
of it as JSON. The exit status is 0 whatever the tests gave, because the figure is the result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.deepspeed_suite import RESULTS_VARIABLE, SAMPLE_VARIABLE
from tests.deepspeed_suite.topics import chosen_files, is_about_internals

ROOT = Path(__file__).parents[2]


def run_file(
    suite: Path,
    file: str,
    arguments: Sequence[str],
    *,
    sample: int,
    seconds: float,
    test_seconds: int,
    log_file: Path,
) -> list[dict[str, Any]]:
    """Run the tests of a file with the output in `log_file`, and return a result for each."""
    with tempfile.TemporaryDirectory(prefix="deepspeed-suite-") as directory:
        results = Path(directory) / "results.jsonl"
        results.touch()
        environment = os.environ | {
            RESULTS_VARIABLE: str(results),
            SAMPLE_VARIABLE: str(sample),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(suite / "tests"), os.environ.get("PYTHONPATH", "")]),
            "DS_UNITTEST_TIMEOUT": str(test_seconds),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": directory,
        }
        command = [sys.executable, "-m", "pytest", "-p", "tests.deepspeed_suite.plugin", "-q"]
        command += ["-c", str(suite / "tests" / "pytest.ini"), "-p", "no:cacheprovider", *arguments, f"unit/{file}"]
        # The results of the tests that ended before a time-out are in the file.
        with log_file.open("w") as log, suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, cwd=suite / "tests", env=environment, timeout=seconds, stdout=log, stderr=log, check=False
            )
        return [json.loads(line) for line in results.read_text().splitlines()]


def cause(reason: str) -> str:
    """Return the kind of an error from its message: the exception, and the message without numbers and names."""
    first = reason.strip().splitlines()[0] if reason.strip() else "no message"
    return re.sub(r"0x[0-9a-f]+|\d+", "N", first)[:160]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.deepspeed_suite", description=__doc__)
    parser.add_argument("suite", type=Path, metavar="DIR", help="a checkout of DeepSpeed")
    parser.add_argument("--file", action="append", help="a file of tests/unit, instead of all that count; repeatable")
    parser.add_argument("-k", dest="expression", help="pytest's expression for the tests of these files")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="run at most N parameter sets of each test function (all)"
    )
    parser.add_argument("--file-seconds", type=float, default=1800.0, help="the most seconds for one file (1800)")
    parser.add_argument("--test-seconds", type=int, default=60, help="the most seconds for one test (60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    parser.add_argument(
        "--logs", type=Path, default=Path("build/deepspeed-tests-logs"), metavar="DIR", help="the output of each file"
    )
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    suite = options.suite.resolve()
    arguments = ["-k", options.expression] if options.expression else []
    found: list[dict[str, Any]] = []
    for file in options.file or chosen_files(suite / "tests" / "unit"):
        log_file = options.logs / f"{file.replace('/', '.')}.log"
        results = run_file(
            suite,
            file,
            arguments,
            sample=options.sample,
            seconds=options.file_seconds,
            test_seconds=options.test_seconds,
            log_file=log_file,
        )
        found += [{"file": file, **result} for result in results]
        print(file, _summary(results), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1))
    print("all", _summary(found))
    print("all but internals", _summary([result for result in found if not is_about_internals(result["test"])]))
    for kind, count in Counter(
        cause(result["reason"]) for result in found if result["outcome"] == "failed"
    ).most_common():
        print(f"{count:5} {kind}")


def _summary(results: Sequence[dict[str, Any]]) -> str:
    """Return the counts, and the share that passed of those that were not skipped, each with its weight."""
    counts, weights = Counter[str](), Counter[str]()
    for result in results:
        counts[result["outcome"]] += 1
        weights[result["outcome"]] += result["weight"]
    ran = weights["passed"] + weights["failed"]
    share = f", share {weights['passed'] / ran:.1%} of {ran:.0f}" if ran else ""
    return f"passed {counts['passed']}, failed {counts['failed']}, skipped {counts['skipped']}{share}"


if __name__ == "__main__":
    main()
