"""Kills the storage engine at random moments, and checks that no committed step is lost or partly visible.

`python -m tests.faults.campaign --rounds N --seed S [--keep DIR] [--json]`. Un-synced writes are dropped or torn, as at
a power loss. Prints a report in JSON at the end; the exit status is 1 if any round failed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.faults import shim

ROOT = Path(__file__).parents[2]


@dataclass(slots=True, kw_only=True)
class Report:
    """The results of a campaign.

    Attributes:
        kills: the number of kills of each kind.
        fates: the number of un-synced writes that were kept, dropped or torn.
        vanished: the number of un-synced files that a power loss removed.
    """

    seed: int
    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    vanished: int = 0
    commits: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def dump(self, indent: int | None) -> str:
        """Return the report as JSON."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, indent=indent)

    def add(self, result: dict[str, Any]) -> None:
        """Add the driver's result of one round."""
        self.rounds += 1
        self.kills.update(result["kills"])
        self.fates.update(result["fates"])
        self.vanished += result["vanished"]
        self.commits += result["commits"]
        if result["errors"]:
            first, number = result["first"], result["number"]
            repeat = f"python -m tests.faults.campaign --seed {self.seed} --first {first} --rounds {number - first + 1}"
            self.failures.append(
                {"round": number, "errors": result["errors"], "kept": result["kept"], "repeat": repeat}
            )


def driver_rounds(command: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield each round's result as the driver finishes it; end the driver when the caller stops."""
    driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        for line in driver.stdout:
            yield json.loads(line)
        if driver.wait():
            raise SystemExit(f"the driver ended with status {driver.returncode}; its output is above")
    finally:
        driver.terminate()
        driver.wait()


def run(args: argparse.Namespace, progress: Progress) -> Report:
    """Run all rounds, and return the report."""
    report = Report(seed=args.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paramserver-faults-") as temporary:
        directory = Path(temporary)
        command = [sys.executable, "-m", "tests.faults.driver", f"--directory={directory}", f"--keep={args.keep}"]
        command += [f"--first={args.first}", f"--rounds={args.rounds}", f"--seed={args.seed}"]
        command += [f"--mutant={args.mutant}"] if args.mutant else []
        bar = progress.add_task("killing", total=args.rounds, failures=0)
        for result in driver_rounds(command, shim.environment(shim.build(directory))):
            report.add(result)
            progress.update(bar, advance=1, failures=len(report.failures))
    report.seconds = round(time.monotonic() - started, 1)
    return report


def main() -> None:
    """Run a campaign and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to repeat a failed one")
    parser.add_argument("--keep", type=Path, default=Path("build/faults"), help="where failed rounds are kept")
    parser.add_argument("--json", action="store_true", help="print the report only")
    parser.add_argument("--mutant", help="a fault of tests/faults/mutants.py, which the campaign must find")
    args = parser.parse_args()
    # SIGTERM raises, as an interrupt does, so that no process and no temporary file is left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args.keep = args.keep.resolve()
    args.seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True, quiet=args.json)
    console.print(f"seed {args.seed}")
    try:
        with Progress(*columns, TextColumn("{task.fields[failures]} failed"), console=console) as progress:
            report = run(args, progress)
    except shim.NoCompilerError as error:
        raise SystemExit(str(error)) from error
    print(report.dump(None if args.json else 2))
    raise SystemExit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
