"""Kills clients and daemons of jobs on the simulated device, and looks for what is left behind.

`python -m tests.device.kills --kills 100 --seed S` (`make device-kills N=100`). Half of the kills end a rank by SIGKILL
within a step, while copies of the device are late; its job resumes. The others end the daemon by SIGKILL under a rank
that goes on with the next daemon.

After each kill of a rank the store has no session, no leased and no quarantined byte, and as many bytes of the host
tier and as many open files as before the rank came. After each run in which the daemon was killed, the rank has no
registered memory and no memory of the device, the state directory has the files of a run without kills, and no process
of the run is left. All runs end with the bits of one without kills.

Prints a report in JSON; the exit status is 1 if anything was left, or a bit differs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.device import native_build
from tests.device.matrix import DAEMON
from tests.device.matrix_rank import Task, tasks_as_json
from tests.device.training_on_lanes import Lateness
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.matrix_cells import run_of
from tests.integration.support.ranks import Launch

MODULE = "tests.device.matrix_rank"
# Each place has other memory on the device and in the store.
PLACES = (
    "zero-3 + everything nvme",
    "zero-3 + everything host",
    "zero-3 + fractions",
    "zero-2 + optimizer host",
    "zero-2",
)
TRAINING = "fp32, each micro-batch"
KILLS_OF_ROUND = 5
CLIENT_STEPS = 4
DAEMON_STEPS = 24
END_SECONDS = 300.0
SETTLE_SECONDS = 60.0
# A job leaves these in the store on purpose, from its first client on: cached shards, and open files of its catalog.
KEPT = ("used of the host tier", "open files")


def usage(daemon: Daemon) -> dict[str, int]:
    """Return what a daemon holds for clients."""
    with admin_of(daemon.address) as admin:
        reading = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10)
    held = {"sessions": reading.sessions}
    for tier in reading.tiers:
        held |= {f"leased of tier {tier.tier}": tier.leased_bytes}
        held |= {f"quarantined of tier {tier.tier}": tier.quarantined_bytes}
    host = reading.tiers[0]
    return held | {"used of the host tier": host.used_bytes, "open files": _open_files(daemon)}


def _open_files(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def nothing(daemon: Daemon) -> dict[str, int]:
    """Return the usage of a daemon without clients, but for what a job keeps in it."""
    return {name: 0 for name in usage(daemon) if name not in KEPT}


def settle(daemon: Daemon, before: Mapping[str, int]) -> dict[str, str]:
    """Wait until a daemon holds no more than before, and return what it still holds after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        more = {n: f"{now}, before {before[n]}" for n, now in usage(daemon).items() if now > before.get(n, now)}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.05)


def processes_of(directory: Path) -> set[int]:
    """Return the processes that have files below a directory open, or mapped memory of a removed arena."""
    found = set()
    for process in psutil.process_iter():
        try:
            if any(Path(file.path).is_relative_to(directory) for file in process.open_files()):
                found.add(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


class Game:
    """The rounds of a campaign, and what they have shown."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory = directory
        self._rng = rng
        self._expected: dict[tuple[str, int], str] = {}
        self._files: dict[str, set[str]] = {}
        self._rounds = 0
        self.kills = {"client": 0, "daemon": 0}
        self.runs = 0
        self.problems: list[str] = []
        self.settled_seconds: list[float] = []

    def _place(self) -> Path:
        self._rounds += 1
        place = self._directory / str(self._rounds)
        place.mkdir()
        return place

    def _task(self, daemon: Daemon, place: str, job: str, steps: int, **kill: Any) -> Task:
        run = replace(run_of(TRAINING, place, 1, daemon.address, job), steps=steps)
        lateness = Lateness(random_ms=20, seed=self._rng.randrange(1 << 16))
        return Task(name=job, run=asdict(run), lateness=asdict(lateness), **kill)

    def _launch(self, directory: Path, task: Task) -> Launch:
        lines, plan = directory / "lines.jsonl", directory / "plan.json"
        lines.unlink(missing_ok=True)
        plan.write_text(tasks_as_json([task], lines))
        return Launch(MODULE, 1, (plan,), directory)

    def _end(self, directory: Path, launch: Launch, name: str, key: tuple[str, int]) -> dict[str, Any] | None:
        """Wait for a run's end, compare it with the one without kills, and return its line."""
        codes = launch.wait(END_SECONDS)
        if codes != [0]:
            self.problems.append(f"{name}: exit code {codes}\n{launch.output()[-3000:]}")
            return None
        line: dict[str, Any] = json.loads((directory / "lines.jsonl").read_text())
        self.runs += 1
        if line["end_digest"] != self._expected.setdefault(key, line["end_digest"]):
            self.problems.append(f"{name}: other bits than without kills")
        if any(line["left_bytes"]):
            self.problems.append(f"{name}: registered and device bytes were left: {line['left_bytes']}")
        return line

    def quiet(self, place: str, steps: int) -> int:
        """Make a run without kills, for what the others are compared with; return its number of polls."""
        directory = self._place()
        with Daemon(directory / "state", DAEMON) as daemon:
            task = self._task(daemon, place, "quiet", steps, guarded=False)
            with self._launch(directory, task) as launch:
                line = self._end(directory, launch, f"{place}, quiet", (place, steps))
            assert line is not None, self.problems
            daemon.stop()
        self._files.setdefault(place, _files_of(directory / "state"))
        return int(line["polls"])

    def kill_clients(self, place: str, polls: int, kills: int) -> None:
        """Kill ranks of one job, one after the other, and let the job end."""
        directory, name = self._place(), f"{place}, clients"
        with Daemon(directory / "state", DAEMON) as daemon:
            before: dict[str, int] | None = None
            for number in range(kills):
                # The job resumes where its last step was committed, so late moments come in its first run only.
                at = self._rng.randrange(1, max(2, polls * (kills - number) // (kills + 1)))
                with self._launch(directory, self._task(daemon, place, "job", CLIENT_STEPS, dies_at=at)) as launch:
                    (code,) = launch.wait(END_SECONDS)
                began = time.monotonic()
                if code != -signal.SIGKILL:
                    if code != 0:
                        self.problems.append(f"{name}: exit code {code}\n{launch.output()[-3000:]}")
                    continue
                self.kills["client"] += 1
                if before is None:
                    self._note(name, settle(daemon, nothing(daemon)))
                    before = usage(daemon)
                else:
                    self._note(name, settle(daemon, before))
                self.settled_seconds.append(time.monotonic() - began)
            with self._launch(directory, self._task(daemon, place, "job", CLIENT_STEPS)) as launch:
                self._end(directory, launch, name, (place, CLIENT_STEPS))
            self._stop(daemon, directory, place, name)

    def kill_daemons(self, place: str, kills: int) -> None:
        """Kill the daemon under one rank at random moments, and start it again each time."""
        directory, name = self._place(), f"{place}, daemons"
        daemon = Daemon(directory / "state", DAEMON)
        try:
            task = self._task(daemon, place, "job", DAEMON_STEPS, guarded=False)
            with self._launch(directory, task) as launch:
                for _ in range(kills):
                    time.sleep(self._rng.uniform(0.3, 2.0))
                    if not launch.is_whole:
                        break
                    daemon.kill()
                    self.kills["daemon"] += 1
                    daemon = Daemon(directory / "state", DAEMON)
                self._end(directory, launch, name, (place, DAEMON_STEPS))
            self._note(name, settle(daemon, nothing(daemon)))
            self._stop(daemon, directory, place, name)
        finally:
            daemon.kill()

    def _stop(self, daemon: Daemon, directory: Path, place: str, name: str) -> None:
        """Stop a daemon in order, and look at its files and at the processes."""
        if (code := daemon.stop()) != 0:
            self.problems.append(f"{name}: the daemon ended with {code}\n{daemon.log[-2000:]}")
        if more := _files_of(directory / "state") - self._files[place]:
            self.problems.append(f"{name}: files were left: {sorted(more)}")
        if left := processes_of(directory):
            self.problems.append(f"{name}: processes were left: {left}")

    def _note(self, name: str, more: Mapping[str, str]) -> None:
        if more:
            self.problems.append(f"{name}: the store still holds {dict(more)}")


def _files_of(state: Path) -> set[str]:
    """Return the names of the files of a state directory; the numbers in them differ from run to run."""
    return {"".join("#" if c.isdigit() else c for c in str(f.relative_to(state))) for f in state.rglob("*")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.device.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    args = parser.parse_args()
    native_build.library()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    began, rng = time.monotonic(), random.Random(seed)
    shared = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory(prefix="device-kills-") as temporary:
        game = Game(Path(temporary), rng)
        polls = {place: game.quiet(place, CLIENT_STEPS) for place in PLACES}
        for place in PLACES:
            game.quiet(place, DAEMON_STEPS)
        number = 0
        while sum(game.kills.values()) < args.kills and len(game.problems) < 10:
            place = PLACES[number // 2 % len(PLACES)]
            kills = min(KILLS_OF_ROUND, args.kills - sum(game.kills.values()))
            if number % 2:
                game.kill_daemons(place, kills)
            else:
                game.kill_clients(place, polls[place], kills)
            number += 1
            print(f"{game.kills}, {len(game.problems)} problems", file=sys.stderr, flush=True)
    # Other programs may have shared memory, too, so this is shown and no failure.
    report = {
        "seed": seed,
        "kills": game.kills,
        "runs": game.runs,
        "seconds": round(time.monotonic() - began),
        "longest_until_the_store_held_nothing_seconds": round(max(game.settled_seconds, default=0.0), 1),
        "new_files_in_dev_shm": len(set(Path("/dev/shm").iterdir()) - shared),
        "problems": game.problems,
    }
    print(json.dumps(report, indent=2))
    raise SystemExit(1 if game.problems else 0)


if __name__ == "__main__":
    main()
