"""Leaves out each wait, event, record and reference that orders copies, and looks whether tests find it.

`python -m tests.device.mutants` (`make mutants`). Each mutant (mutation.py) runs the programs of mutant_programs.py in
a process of its own, on one rank, and if none of them finds it, on two; a mutant of collectives runs on two ranks
first. A mutant is found if a program computes other bits, if the device sees a race, if it fails, or if it hangs.

The right code takes the part of a mutant first. If something is found in it, the programs find everything, and the
campaign ends with an error.

Prints a table, or JSON with --json. The exit status is 1 if a mutant was not found that is not in HARMLESS.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.device import native_build
from tests.device.matrix import store
from tests.device.mutant_programs import ALONE, TOGETHER
from tests.device.mutant_run import Plan
from tests.device.mutation import Site, sites
from tests.integration.support.ranks import Launch

# A process ends by itself if one of its programs hangs (Program.most_seconds). One that runs for longer than this hangs
# elsewhere; on a busy machine all programs of the right code take 60 s.
HANG_SECONDS = 400.0
# The beginning of the text that a process prints which ends because a program hangs.
HANGS = "Timeout ("
# A mutant may break a store, so after so many of them there is a new one.
MUTANTS_OF_STORE = 10

# The mutants that change no result, with the reason. The keys are the names of sites.
_MAKES_ROOM = "it orders no bytes: it returns leases before a wait for room in the store, which may need that room"
HARMLESS: Mapping[str, str] = {
    "gradient_memory.LeasedMemory.wait: wait `self._lanes.finish_copies_in()`": _MAKES_ROOM,
    "units.Unit._wait_for: wait `self._lanes.finish_copies_in()`": _MAKES_ROOM,
}


def run(plan: Plan, world_size: int, directory: Path) -> dict[str, Any]:
    """Run the programs, and return what mutant_run.py wrote; or how the process ended, which finds the mutant, too."""
    result = Path(plan.result)
    result.unlink(missing_ok=True)
    file = directory / "plan.json"
    file.write_text(json.dumps(asdict(plan)))
    with Launch("tests.device.mutant_run", world_size, (file,), directory) as launch:
        deadline = time.monotonic() + HANG_SECONDS
        # If one rank fails, the others may wait for it.
        while launch.is_whole and time.monotonic() < deadline:
            time.sleep(0.05)
        is_late = time.monotonic() >= deadline
        if not is_late and not any(rank.poll() for rank in launch.ranks):
            launch.wait(HANG_SECONDS)
        output = launch.output()
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    error = next((line for line in reversed(output.splitlines()) if "Error" in line or "assert" in line), "")
    return {
        "found_by": "its end",
        "schedule": "",
        "as": "hang" if is_late or HANGS in output else "failure",
        "races": [error[:160]],
    }


def judge(
    chosen: Sequence[Site], programs: Sequence[str], directory: Path, limit_seconds: float
) -> list[dict[str, Any]]:
    """Run all chosen mutants, and return a row for each; no mutant begins after the limit.

    Args:
        programs: the names of the programs to run; empty: all.
    """
    every, began = sites(), time.monotonic()
    with store(directory) as daemon:
        right = {
            ranks: _right_plan(ranks, programs, daemon.address, directory)
            for ranks, all_programs in ((1, ALONE), (2, TOGETHER))
            if not programs or not all_programs.keys().isdisjoint(programs)
        }
    rows: list[dict[str, Any]] = []
    for first in range(0, len(chosen), MUTANTS_OF_STORE):
        place = directory / f"{first}"
        place.mkdir()
        with store(place) as daemon:
            for site in chosen[first : first + MUTANTS_OF_STORE]:
                if time.monotonic() - began > limit_seconds:
                    print(f"{len(chosen) - len(rows)} mutants were left out: the time was up", file=sys.stderr)
                    return rows
                rows.append(_judge_one(site, every.index(site), daemon.address, right, place))
                print(f"{len(rows)}/{len(chosen)} {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return rows


def _right_plan(ranks: int, programs: Sequence[str], address: str, directory: Path) -> Plan:
    """Return the plan of the right code, with the results of the programs as what is expected.

    Raises:
        RuntimeError: they compute something else the next time, or find a mistake in it.
    """
    result = str(directory / "result.json")
    right = Plan(site=None, address=address, job=f"right {ranks}", programs=programs, result=result)
    first = run(right, ranks, directory)
    if first["found_by"] is None:
        right = replace(right, job=f"right {ranks} again", expected=first["results"])
        first = run(right, ranks, directory)
    if first["found_by"] is not None:
        raise RuntimeError(f"the right code on {ranks} ranks was taken for a mutant: {first}")
    return right


def _judge_one(site: Site, number: int, address: str, right: Mapping[int, Plan], place: Path) -> dict[str, Any]:
    began = time.monotonic()
    row: dict[str, Any] = {"site": site.name, "found_by": None}
    # One rank alone has no collectives, so the programs of two find these mutants.
    is_of_ranks = ".ranks." in site.module or "communicating" in site.text
    for ranks, plan in sorted(right.items(), reverse=is_of_ranks):
        job, result = f"mutant {number} {ranks}", str(place / "result.json")
        found = run(replace(plan, site=number, address=address, job=job, result=result), ranks, place)
        if found["found_by"] is not None:
            row |= found | {"ranks": ranks}
            break
    else:
        row |= {"harmless": HARMLESS[site.name]} if site.name in HARMLESS else {}
    return row | {"seconds": round(time.monotonic() - began)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| left out | found as | by | ranks |", "| --- | --- | --- | ---: |"]
    for row in rows:
        by = f"{row['found_by']}, {row['schedule']}" if row["found_by"] else row.get("harmless", "NOT FOUND")
        lines.append(f"| {row['site']} | {row.get('as', '-')} | {by} | {row.get('ranks', '-')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.device.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="mutants whose name contains this; repeatable")
    parser.add_argument("--program", action="append", default=[], help="only this program; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after this time")
    args = parser.parse_args()
    native_build.library()
    chosen = [site for site in sites() if not args.only or any(part in site.name for part in args.only)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        rows = judge(chosen, args.program, Path(temporary), args.seconds)
    lost = [row["site"] for row in rows if row["found_by"] is None and "harmless" not in row]
    score = {"mutants": len(rows), "found": sum(row["found_by"] is not None for row in rows), "not_found": lost}
    print(json.dumps(score | {"rows": rows}, indent=1) if args.json else f"{table(rows)}\n\n{json.dumps(score)}")
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()
