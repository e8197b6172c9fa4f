"""A process (or a rank) that has at most one mutant, and runs the programs that may find it: see mutants.py.

`python -m tests.device.mutant_run PLAN.json`, with torchrun's environment variables. Rank 0 writes a JSON object to the
plan's file: which program has found the mutant, and by what, or the results of all programs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.device import lag, mutation
from tests.device.mutant_programs import ALONE, LATE, TOGETHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a process does.

    Attributes:
        site: the number of the mutant among mutation.sites(); None: the right code.
        address: the store.
        job: what the names of jobs begin with.
        programs: the names of the programs to run; empty: all.
        expected: the right result of each program; empty: there is none yet.
        result: the file to write to.
    """

    site: int | None
    address: str
    job: str
    programs: Sequence[str] = ()
    expected: dict[str, str] = field(default_factory=dict)
    result: str


def look(plan: Plan, world_size: int) -> dict[str, Any]:
    """Run the programs until one of them finds something, and return what was found."""
    programs = ALONE if world_size == 1 else TOGETHER
    results: dict[str, str] = {}
    for name, program in programs.items():
        if plan.programs and name not in plan.programs:
            continue
        for schedule in program.schedules if plan.expected else program.schedules[:1]:
            faulthandler.dump_traceback_later(program.most_seconds, exit=True)
            result = program.run(LATE[schedule], plan.address, f"{plan.job} {name} {schedule}")
            faulthandler.cancel_dump_traceback_later()
            races = [str(race) for race in lag.races()]
            lag.clear_races()
            if world_size > 1:
                # Each rank has losses of its own, and sees its own races.
                seen: list[tuple[str, list[str]]] = [("", [])] * world_size
                dist.all_gather_object(seen, (result, races))
                result = " ".join(bits for bits, _ in seen)
                races = [race for _, found in seen for race in found]
            by = "race" if races else "bits" if plan.expected and plan.expected[name] != result else None
            if by is not None:
                return {"found_by": name, "schedule": schedule, "as": by, "races": races[:1]}
            results[name] = result
    return {"found_by": None, "results": results}


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    lag.load()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        dist.init_process_group("cpu:gloo,lag:lag")
    if plan.site is not None:
        mutation.apply(mutation.sites()[plan.site])
    found = look(plan, world_size)
    if rank == 0:
        Path(plan.result).write_text(json.dumps(found))
    # A mutant may have broken what the process does at its end, so it ends at once.
    os._exit(0)


if __name__ == "__main__":
    main()
