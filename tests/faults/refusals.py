"""Fails each system call of one training step in turn, in processes of their own, and checks what became of the job.

Runs in a process that was started with the shim, and says one line of JSON per call; `refusals` starts it for tests.
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

from storage.engine import Engine
from storage.errors import StorageError
from storage.tiers import threaded_io
from tests.faults import checker, shim
from tests.faults.child import Child
from tests.faults.driver import HANGS_SECONDS
from tests.faults.jobs import JobShape
from tests.faults.oracle import Act, Announcement, Oracle
from tests.faults.power_loss import Mood, Record, events, lose_power, trim_log
from tests.faults.worker import Announce, Trainer, engine_config

ROOT = Path(__file__).parents[2]
# Fractions of a tile: every kind of call is there, and few of each.
SHAPE = JobShape(name="job", groups={"wide": 10_000, "small": 16}, half=True, moments_on_host=False, every_steps=1)


class Way(enum.Enum):
    """What is done about a refused step, and how the process ends: it never closes the engine."""

    # The job goes back and on; then the power is lost.
    ROLL_BACK = "roll-back"
    # The same step is committed again; then the power is lost.
    COMMIT_AGAIN = "commit-again"
    # The job goes back, and the process is killed when it has written the step anew but not committed it.
    KILL = "kill"


@dataclass(slots=True, kw_only=True)
class Result:
    """`call`: what failed, and of which file; `refusal`: what the engine said to that; `errors`: all that is wrong."""

    number: int
    call: str = ""
    refusal: str = ""
    errors: list[str] = field(default_factory=list)


async def _live(state_dir: Path, oracle: Oracle, announce: Announce, arm: Callable[[], None], way: Way) -> None:
    # A call for each request, so that their number is the same in each process.
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
    """One process in which, in the third step, the `number`-th call on the files called `name` fails, and `lasting`:
    the later ones too, until the step is refused."""

    directory: Path
    name: str
    number: int
    error: int
    way: Way
    lasting: bool

    def run(self) -> Result:
        """What came of it."""
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
    """What came of each failed call of one step on the files whose names begin with `name`; see Case.

    Raises:
        NoCompilerError: the shim cannot be compiled.
    """
    environment = shim.environment(shim.build(directory))
    command = [sys.executable, "-m", "tests.faults.refusals", f"--directory={directory}", f"--error={error}"]
    command += [f"--way={way.value}", f"--name={name}", *(["--lasting"] if lasting else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Result(**json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    """Says a line per call, until there is none left to fail."""
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
