"""The rounds of a campaign: forks workers and checkers from one process that has imported everything, and kills them.

tests.faults.campaign starts this process with the shim. It has no threads and no event loop, and computes nothing with
torch, so that it can fork at any time. It prints one line of JSON per round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

from storage.base import failpoints
from storage.base.failpoints import Failpoint
from storage.engine import Engine
from tests.faults import checker, shim, worker
from tests.faults.child import Child
from tests.faults.jobs import JOBS
from tests.faults.mutants import MUTANTS
from tests.faults.oracle import Act, Announcement, Oracle
from tests.faults.power_loss import Record, SystemCall, events, lose_power, trim_log

LONGEST_TRAINING_SECONDS = 0.3
# A child can be armed to kill itself at a failpoint or a system call. If that does not happen within this time, the
# driver kills it.
ARMED_SECONDS = 5.0
# A process that has not finished its work in this time hangs.
HANGS_SECONDS = 60.0
# The probability that a power loss follows a kill.
POWER_LOSS = 0.75

TIME = "time"
CALL = "call"
TORN = "torn"
RECOVERY_CALL = "recovery call"
# The kinds of kills, which rounds use in turn so that a few rounds cover all of them. FILE_GROWN needs a new directory,
# because the data file grows only once.
TURNS: tuple[str | Failpoint, ...] = (
    Failpoint.FILE_GROWN,
    TIME,
    CALL,
    Failpoint.DATA_WRITTEN,
    TORN,
    Failpoint.DURING_RECOVERY,
    Failpoint.DATA_SYNCED,
    CALL,
    Failpoint.BEFORE_FLIP,
    RECOVERY_CALL,
    TIME,
    Failpoint.AFTER_FLIP,
    TORN,
    CALL,
    Failpoint.DURING_RECLAIM,
    RECOVERY_CALL,
    CALL,
    TORN,
    TIME,
    RECOVERY_CALL,
)


@dataclass(slots=True, kw_only=True)
class Round:
    """The result of one round. `first` is the number of the round in which its directory was new."""

    number: int
    first: int
    kills: list[str] = field(default_factory=list)
    fates: dict[str, int] = field(default_factory=dict)
    vanished: int = 0
    commits: int = 0
    errors: list[str] = field(default_factory=list)
    kept: str = ""

    def dump(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Epoch:
    """One state directory, which several rounds use after each other."""

    directory: Path
    first: int
    oracle: Oracle = field(default_factory=lambda: Oracle(JOBS))
    # The number of kills in the undo log that are counted already.
    kills: int = 0

    def __post_init__(self) -> None:
        self.state_dir.mkdir(parents=True)
        self.undo_log.touch()

    @property
    def state_dir(self) -> Path:
        """The engine's state directory."""
        return self.directory / "state"

    @property
    def undo_log(self) -> Path:
        """The log that the shim writes; see power_loss.py."""
        return self.directory / "undo.log"

    @property
    def output(self) -> Path:
        """The file that gets the output of all processes."""
        return self.directory / "output.log"

    @property
    def announced(self) -> Path:
        """The file that gets all announcements of the workers."""
        return self.directory / "announced.jsonl"


class Campaign:
    """The rounds of one campaign."""

    def __init__(self, directory: Path, kept: Path, seed: int, *, mutant: str | None) -> None:
        self._directory = directory
        self._kept = kept
        self._seed = seed
        self._mutant = mutant
        self._epoch: Epoch | None = None

    def run(self, number: int) -> Round:
        """Run one round: train, kill, lose power, check."""
        rng = random.Random(f"{self._seed} {number}")
        turn = TURNS[number % len(TURNS)]
        if self._epoch is None or turn is Failpoint.FILE_GROWN:
            self._drop_epoch()
            self._epoch = Epoch(self._directory / f"epoch-{number}", number)
        epoch = self._epoch
        result = Round(number=number, first=epoch.first)
        before = epoch.oracle.commits
        if epoch.first == number and rng.random() < 0.5:
            self._recover(epoch, result, rng, call=rng.randint(1, 40))
        if not result.errors:
            self._train(epoch, result, rng, turn)
        if turn is Failpoint.DURING_RECOVERY and not result.errors:
            self._recover(epoch, result, rng, failpoint=turn)
        if turn == RECOVERY_CALL and not result.errors:
            self._recover(epoch, result, rng, call=_log_uniform(rng, 40), torn=rng.choice([0, rng.randint(1, 999)]))
        if not result.errors:
            self._check(epoch, result, rng)
        result.commits = epoch.oracle.commits - before
        if result.errors:
            self._keep(epoch, result)
        return result

    def close(self) -> None:
        """Remove the directory of the last rounds."""
        self._drop_epoch()

    def _train(self, epoch: Epoch, result: Round, rng: random.Random, turn: str | Failpoint) -> None:
        """Train in a child until it is killed, then lose power with the probability POWER_LOSS."""
        arm = _armed(turn, rng)
        seed = rng.getrandbits(64)
        seconds = rng.uniform(0, LONGEST_TRAINING_SECONDS) if arm is None else ARMED_SECONDS

        def work(pipe: int) -> int:
            self._prepare(epoch)
            return worker.run(epoch.state_dir, epoch.oracle, pipe, seed, arm or (lambda: None))

        with Child(work, epoch.output) as child, epoch.announced.open("a") as announced:
            opened = False
            for line in child.lines(HANGS_SECONDS):
                opened = self._hear(epoch, result, line, announced.write) is Act.TRAINING
                if opened or result.errors:
                    break
            if not opened and not result.errors:
                result.errors.append(f"the worker has not opened the engine in {HANGS_SECONDS:g} s: it hangs or died")
            for line in child.lines(seconds):
                self._hear(epoch, result, line, announced.write)
            status = child.end()
            for line in child.lines(HANGS_SECONDS):
                self._hear(epoch, result, line, announced.write)
        self._after_kill(epoch, result, rng, status, turn if isinstance(turn, Failpoint) else None)

    def _hear(self, epoch: Epoch, result: Round, line: str, write: Callable[[str], object]) -> Act:
        write(f"{line}\n")
        said = Announcement.load(line)
        if said.act is Act.FAILED:
            result.errors.append(said.text)
            return said.act
        try:
            epoch.oracle.hear(said)
        except AssertionError as error:
            result.errors.append(str(error))
        return said.act

    def _recover(
        self,
        epoch: Epoch,
        result: Round,
        rng: random.Random,
        *,
        call: int = 0,
        torn: int = 0,
        failpoint: Failpoint | None = None,
    ) -> None:
        """Open the engine in a child that is killed meanwhile, then lose power with the probability POWER_LOSS."""

        async def open_and_close() -> None:
            await (await Engine.open(worker.engine_config(epoch.state_dir))).close()

        def work(pipe: int) -> int:
            self._prepare(epoch)
            if failpoint is not None:
                _kill_at_failpoint(failpoint, 1)
            else:
                shim.kill_at(call, torn)
            try:
                uvloop.run(open_and_close())
            except Exception:
                os.write(pipe, f"{traceback.format_exc()[-3000:]}\n".encode())
                return 1
            return 0

        with Child(work, epoch.output) as child:
            said = list(child.lines(HANGS_SECONDS))
            status = child.end()
        if said:
            result.errors.append("the recovery ended with\n" + "\n".join(said))
        self._after_kill(epoch, result, rng, status, failpoint, "recovery, ")

    def _after_kill(
        self,
        epoch: Epoch,
        result: Round,
        rng: random.Random,
        status: int,
        failpoint: Failpoint | None,
        prefix: str = "",
    ) -> None:
        trim_log(epoch.undo_log)
        kills = [
            f"{call.name.lower()} {name}" for record, call, name in events(epoch.undo_log) if record is Record.KILL
        ]
        at_calls, epoch.kills = kills[epoch.kills :], len(kills)
        if result.errors:
            return
        reached = epoch.directory / "failpoint"
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            if not prefix:
                result.errors.append(f"the worker ended by itself, wait status {status}; see {epoch.output.name}")
            return
        if failpoint is not None and reached.exists():
            result.kills.append(f"failpoint: {failpoint.value}")
        else:
            result.kills.append(prefix + (f"call: {at_calls[-1]}" if at_calls else TIME))
        reached.unlink(missing_ok=True)
        # Without a power loss only the process died. Its un-synced writes are still there, and a later power loss may
        # drop them.
        if rng.random() < POWER_LOSS:
            outcome = lose_power(epoch.state_dir, epoch.undo_log, rng)
            epoch.kills = 0
            fates = Counter(result.fates) + Counter({fate.value: n for fate, n in outcome.fates.items()})
            result.fates = dict(fates)
            result.vanished += len(outcome.vanished)

    def _check(self, epoch: Epoch, result: Round, rng: random.Random) -> None:
        epoch.oracle.prepare()
        roll_back, close = rng.random() < 0.5, rng.random() < 0.5

        def work(pipe: int) -> int:
            self._prepare(epoch)
            return checker.run(epoch.state_dir, epoch.oracle, pipe, roll_back=roll_back, close=close)

        with Child(work, epoch.output) as child:
            said = list(child.lines(HANGS_SECONDS))
            child.end()
        if not said:
            result.errors.append(f"the checker said nothing: it hangs or died; see {epoch.output.name}")
            return
        verdict = checker.Verdict.load(said[0])
        result.errors += verdict.errors
        for name, newest in verdict.newest.items():
            epoch.oracle.jobs[name].set_to(newest, verdict.retained[name])
            epoch.oracle.jobs[name].set_kept(verdict.kept[name])

    def _prepare(self, epoch: Epoch) -> None:
        """Have the shim watch the calling child's system calls. Each child calls this first."""
        _reached_file.path = epoch.directory / "failpoint"
        if self._mutant is not None:
            MUTANTS[self._mutant]()
        shim.configure(epoch.state_dir, epoch.undo_log)

    def _keep(self, epoch: Epoch, result: Round) -> None:
        self._kept.mkdir(parents=True, exist_ok=True)
        kept = self._kept / f"seed-{self._seed}-round-{result.number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(epoch.directory, kept)
        (kept / "errors.txt").write_text("\n".join(result.errors))
        result.kept = str(kept)
        self._epoch = None

    def _drop_epoch(self) -> None:
        if self._epoch is not None:
            shutil.rmtree(self._epoch.directory)
            self._epoch = None


class _ReachedFile:
    """The file that a child creates just before a failpoint kills it."""

    path: Path


_reached_file = _ReachedFile()


def _kill_at_failpoint(failpoint: Failpoint, reach: int) -> None:
    left = reach

    def handler(reached: Failpoint) -> None:
        nonlocal left
        if reached is failpoint:
            left -= 1
            if left == 0:
                _reached_file.path.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    failpoints.install(handler)


def _armed(turn: str | Failpoint, rng: random.Random) -> Callable[[], None] | None:
    """Return the function by which a worker arms its kill once its engine is open; None if the driver kills it."""
    if turn in (TIME, RECOVERY_CALL, Failpoint.DURING_RECOVERY):
        return None
    if isinstance(turn, Failpoint):
        reach = 1 if turn is Failpoint.FILE_GROWN else _log_uniform(rng, 60)
        return lambda: _kill_at_failpoint(turn, reach)
    torn = rng.randint(1, 999) if turn == TORN else 0
    # Most calls are writes of data. Calls on the catalog would be too rare if they were not chosen explicitly.
    name, kind = rng.choice(
        [
            ("", 0),
            ("catalog", 0),
            ("catalog", SystemCall.WRITE if torn else SystemCall.SYNC),
            ("data", SystemCall.WRITE),
        ]
    )
    call = _log_uniform(rng, 100 if name == "catalog" else 400)

    def arm() -> None:
        shim.match(name, kind)
        shim.kill_at(call, torn)

    return arm


def _log_uniform(rng: random.Random, highest: int) -> int:
    return round(math.exp(rng.uniform(0, math.log(highest))))


def main() -> None:
    """Run the rounds, and print one line of JSON for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mutant", choices=MUTANTS)
    args = parser.parse_args()
    # A terminated driver ends its children on its way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    campaign = Campaign(args.directory, args.keep, args.seed, mutant=args.mutant)
    try:
        for number in range(args.first, args.first + args.rounds):
            print(campaign.run(number).dump(), flush=True)
    finally:
        campaign.close()


if __name__ == "__main__":
    main()
