"""Fails each system call of one training step in turn, each in a process of its own, and checks the job afterwards.

This program runs in a process that was started with the shim, and prints one line of JSON per call. Tests start it by
the function `refusals`.
"""

from __future__ import annotations

import argparse
import enum
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from storage.base.errors import StorageError
from storage.engine import Engine
from storage.tiers import threaded_io
from tests.faults import checker, shim
from tests.faults.child import Child
from tests.faults.driver import HANGS_SECONDS
from tests.faults.jobs import JobShape
from tests.faults.oracle import Act, Announcement, Oracle
from tests.faults.power_loss import Mood, Record, events, lose_power, trim_log
from tests.faults.worker import Announce, Trainer, engine_config

ROOT = Path(__file__).parents[2]
# Each group is smaller than a tile, so that a step makes every kind of call and few of each.
SHAPE = JobShape(name="job", groups={"wide": 10_000, "small": 16}, half=True, moments_on_host=False, every_steps=1)


class Way(enum.Enum):
    """The worker's reaction to a refused step, and the end of its process, which never closes the engine."""

    # The worker rolls back and trains on. Then the power is lost.
    ROLL_BACK = "roll-back"
    # The worker commits the same step again. Then the power is lost.
    COMMIT_AGAIN = "commit-again"
    # The worker rolls back and writes the step anew. The process is killed before the commit.
    KILL = "kill"


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of one failed call.

    Attributes:
        number: the number of the call within the step.
        call: the call's kind and its file; empty: the step made fewer calls, so none failed.
        refusal: the error that the engine raised.
        errors: everything that is wrong.
    """

    number: int
    call: str = ""
    refusal: str = ""
    errors: list[str] = field(default_factory=list)


async def _live(state_dir: Path, oracle: Oracle, announce: Announce, arm: Callable[[], None], way: Way) -> None:
    # Without coalescing each request is one system call, so that the number of calls is the same in each process.
    threaded_io.COALESCED_BYTES = 0
    engine = await Engine.open(engine_config(state_dir))
    trainer = await Trainer.resume(engine, SHAPE, oracle, announce, random.Random(0))
    await trainer.step()
    await trainer.step()
    step = trainer.job.next_step
    arm()
    try:
        await trainer.step()
    except StorageError as error:
        announce(Announcement(act=Act.REFUSED, text=f"{type(error).__name__}: {error}"))
        shim.fail_at(0, 0)
        if way is Way.COMMIT_AGAIN and await _commit_again(trainer, step):
            return
        await trainer.roll_back_to(step - 1)
        await trainer.read()
        if way is Way.KILL:
            await trainer.hand_over(1)
            await trainer.wait_for_updates()
            return
    shim.fail_at(0, 0)
    await trainer.read()
    await trainer.step()
    await trainer.read()


async def _commit_again(trainer: Trainer, step: int) -> bool:
    try:
        await trainer.commit(step, step - 1)
    except StorageError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Case:
    """One process in which a system call fails in the third step.

    Attributes:
        name: the beginning of the names of the files whose calls are counted.
        number: the number of the call that fails.
        error: the errno.
        lasting: whether all later calls fail too, until the step is refused.
    """

    directory: Path
    name: str
    number: int
    error: int
    way: Way
    lasting: bool

    def run(self) -> Result:
        """Run the process, check the job in another one, and return the result."""
        result = Result(number=self.number)
        oracle = Oracle([SHAPE])
        state_dir, log = self.directory / "state", self.directory / "undo.log"
        state_dir.mkdir(parents=True)
        with Child(self._live, self.directory / "output.log") as child:
            for line in child.lines(HANGS_SECONDS):
                said = Announcement.load(line)
                if said.act is Act.FAILED:
                    result.errors.append(said.text)
                elif said.act is Act.REFUSED:
                    result.refusal = said.text
                oracle.hear(said)
            status = os.waitstatus_to_exitcode(child.end())
        if status != -signal.SIGKILL:
            result.errors.append(f"the process ended with status {status}")
        trim_log(log)
        result.call = next((f"{c.name.lower()} {name}" for r, c, name in events(log) if r is Record.FAIL), "")
        if self.way is not Way.KILL:
            lose_power(state_dir, log, random.Random(self.number), Mood.DROP)
        result.errors += self._check(oracle)
        return result

    def _live(self, pipe: int) -> int:
        oracle = Oracle([SHAPE])

        def announce(said: Announcement) -> None:
            os.write(pipe, f"{said.dump()}\n".encode())
            oracle.hear(said)

        shim.configure(self.directory / "state", self.directory / "undo.log")
        shim.match(self.name)
        try:
            arm = functools.partial(shim.fail_at, self.number, self.error, sticky=self.lasting)
            uvloop.run(_live(self.directory / "state", oracle, announce, arm, self.way))
        except BaseException:
            os.write(pipe, f"{Announcement(act=Act.FAILED, text=traceback.format_exc()[-3000:]).dump()}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def _check(self, oracle: Oracle) -> list[str]:
        def work(pipe: int) -> int:
            return checker.run(self.directory / "state", oracle, pipe, roll_back=True, close=True)

        with Child(work, self.directory / "output.log") as child:
            said = list(child.lines(HANGS_SECONDS))
            child.end()
        return checker.Verdict.load(said[0]).errors if said else ["the checker said nothing: it hangs or died"]


def refusals(directory: Path, error: int, way: Way, name: str = "", *, lasting: bool = False) -> list[Result]:
    """Fail each call of one step on files whose names begin with `name`, one per process; see Case.

    Returns:
        The result for each call.

    Raises:
        NoCompilerError: the shim cannot be compiled.
    """
    environment = shim.environment(shim.build(directory))
    command = [sys.executable, "-m", "tests.faults.refusals", f"--directory={directory}", f"--error={error}"]
    command += [f"--way={way.value}", f"--name={name}", *(["--lasting"] if lasting else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Result(**json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    """Print one line of JSON per call, until the step has no more calls that can fail."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--error", type=int, required=True)
    parser.add_argument("--way", type=Way, required=True)
    parser.add_argument("--lasting", action="store_true")
    args = parser.parse_args()
    for number in range(1, 1000):
        directory = args.directory / str(number)
        result = Case(directory, args.name, number, args.error, args.way, args.lasting).run()
        if not result.call:
            break
        print(json.dumps(asdict(result)), flush=True)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
