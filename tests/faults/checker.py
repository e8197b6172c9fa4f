"""Opens the engine after a crash, in a process of its own, and compares the jobs with the oracle."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from storage.engine import Engine
from storage.state.versions import Job
from tests.faults.oracle import Oracle
from tests.faults.worker import (
    different_kept_steps,
    different_slabs,
    engine_config,
    group_specs,
    job_spec,
    space_errors,
)


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The result of a check.

    Attributes:
        errors: everything that is wrong.
        newest: the newest step of each job; None: the job is gone.
        retained: the retained steps of each job; empty: the job is gone.
        kept: the names of the kept steps of each job.
    """

    errors: list[str] = field(default_factory=list)
    newest: dict[str, int | None] = field(default_factory=dict)
    retained: dict[str, list[int]] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)

    def dump(self) -> str:
        """Return the verdict as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, line: str) -> Verdict:
        """Return the verdict of which `dump` made this line."""
        return cls(**json.loads(line))


async def check(state_dir: Path, oracle: Oracle, *, roll_back: bool, close: bool) -> Verdict:
    """Open the engine and check every job.

    Args:
        state_dir: the engine's state directory.
        oracle: the expected steps and bytes.
        roll_back: roll each job back to its older retained steps, and check their bytes, too.
        close: close the engine at the end. Otherwise SQLite's log stays as it is for the next process.
    """
    verdict = Verdict()
    engine = await Engine.open(engine_config(state_dir))
    verdict.errors += await space_errors(engine)
    unknown = engine.jobs.by_name.keys() - oracle.jobs.keys()
    verdict.errors += [f"nobody made job {name}" for name in sorted(unknown)]
    for name in oracle.jobs:
        found = engine.jobs.by_name[name].newest if name in engine.jobs.by_name else None
        allowed = oracle.jobs[name].allowed()
        if found not in allowed:
            expected = sorted(allowed, key=lambda step: -1 if step is None else step)
            verdict.errors.append(f"job {name} is at step {found}, and may be at {expected}")
        elif found is not None:
            verdict.errors += await _check_job(engine, oracle, name, found, roll_back=roll_back)
        verdict.kept[name] = list(engine.jobs.kept_steps(name))
        if wrong := oracle.jobs[name].wrong_kept(verdict.kept[name]):
            verdict.errors.append(f"job {name} keeps {verdict.kept[name]}: {wrong}")
        verdict.errors += await different_kept_steps(engine, oracle, name)
        verdict.newest[name] = engine.jobs.by_name[name].newest if name in engine.jobs.by_name else None
        verdict.retained[name] = sorted(engine.jobs.by_name[name].retained) if name in engine.jobs.by_name else []
    verdict.errors += await space_errors(engine)
    if close:
        await engine.close()
    return verdict


async def _check_job(engine: Engine, oracle: Oracle, name: str, newest: int, *, roll_back: bool) -> list[str]:
    shape = oracle.jobs[name].shape
    job = await engine.open_job(job_spec(shape), may_exist=True, must_exist=True)
    await engine.register(job, group_specs(shape))
    errors = _check_records(job, oracle, name, newest)
    errors += await different_slabs(engine, oracle, job, newest)
    older = sorted(step for step in job.retained if step < newest)
    while roll_back and older and not errors:
        step = older.pop()
        await engine.roll_back(job, step)
        errors += await different_slabs(engine, oracle, job, step)
    return errors


def _check_records(job: Job, oracle: Oracle, name: str, newest: int) -> list[str]:
    errors = []
    missing = oracle.jobs[name].must_retain(newest) - job.retained.keys()
    if missing:
        errors.append(f"job {name} is at step {newest} and has lost {sorted(missing)}")
    if job.retained.keys() != job.durable:
        errors.append(f"job {name} retains {sorted(job.retained)}, of which durable: {sorted(job.durable)}")
    for step, record in job.retained.items():
        if record.client_states != {0: f"state {step}".encode()}:
            errors.append(f"job {name}: step {step} has the client states {record.client_states}")
    return errors


def run(state_dir: Path, oracle: Oracle, pipe: int, *, roll_back: bool, close: bool) -> int:
    """Run a check in the present process, write its verdict to `pipe`, and return the exit status."""
    try:
        verdict = uvloop.run(check(state_dir, oracle, roll_back=roll_back, close=close))
    except BaseException:
        verdict = Verdict(errors=[f"the check ended with\n{traceback.format_exc()[-3000:]}"])
    os.write(pipe, f"{verdict.dump()}\n".encode())
    return 0
