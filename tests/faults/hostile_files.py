"""Opens thousands of checkpoints, states and backups that are damaged or made to do harm.

`python -m tests.faults.hostile_files --files N --seed S [--json]`. Each is opened as an import, a resume or a restore
opens it. It must be refused with an error of this library, or read, within time and memory that its size explains, and
must change no class of the process and no file. Prints a report in JSON; the exit status is 1 if anything failed.

A process of its own opens the files, so that a crash or a hang costs one of them. The number of a file and the seed are
all that it depends on: `--first NUMBER --files 1 --seed S` opens it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from rich.console import Console

from tests.faults.hostile_specimens import OPENERS, make_specimens
from tests.faults.hostile_spoils import spoil
from trainer_client.errors import TrainerClientError

# No specimen has 1 MiB, and a busy machine opens each within a second.
MOST_SECONDS = 20.0
MOST_GROWTH_BYTES = 256 << 20
# The campaign ends after this many findings.
MOST_FINDINGS = 20
# The memory of a process that opens files. A file that asks for more is refused memory, and not the machine.
MOST_ADDRESSES = 24 << 30


class TooLongError(BaseException):
    """The time of a file is over. No reader catches it as an error of the file."""


def _end(_: int, __: FrameType | None) -> None:
    raise TooLongError


def watched() -> dict[str, int]:
    """Return the ids of all attributes of the classes and modules that a file could name."""
    found: dict[str, int] = {}
    names = ("builtins", "collections", "pathlib", "torch.serialization", "torch.distributed.checkpoint.metadata")
    for name in (*names, *(name for name in sys.modules if name.startswith("trainer_client."))):
        module: ModuleType | None = sys.modules.get(name)
        for key, value in vars(module).items() if module else ():
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{attribute}": id(part) for attribute, part in vars(value).items()}
    return found


def open_one(specimens: Path, seed: int, number: int, room: Path, classes: dict[str, int]) -> tuple[str, str]:
    """Spoil a specimen and open it. Return its name, and what is wrong, or "refused" or "read".

    `classes` is what `watched` has returned before; attributes of modules that were imported since are added.
    """
    rng = random.Random(f"{seed} {number}")
    name = rng.choice(sorted(OPENERS))
    place = room / name
    shutil.copytree(specimens / name, place, symlinks=True)
    how = spoil(rng, place)
    before = sorted(path.name for path in room.rglob("*"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        OPENERS[name](place)
        outcome = "read"
    except (TrainerClientError, OSError) as error:
        outcome = "refused"
        if len(str(error)) > 1 << 20:
            outcome = f"an error of {len(str(error))} characters"
    except TooLongError:
        outcome = f"longer than {MOST_SECONDS:g} s"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    if growth > MOST_GROWTH_BYTES:
        outcome = f"it took {growth >> 20} MiB"
    if changed := {key for key, value in watched().items() if classes.setdefault(key, value) != value}:
        outcome = f"it changed {sorted(changed)[:5]}"
    if sorted(path.name for path in room.rglob("*")) != before:
        outcome = "it made or removed files"
    return f"{name}, {how}", outcome


def work(specimens: Path, seed: int, first: int, count: int) -> None:
    """Open files, and print a line of JSON before and after each."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
    signal.signal(signal.SIGALRM, _end)
    warnings.simplefilter("ignore")
    classes = watched()
    for number in range(first, first + count):
        print(json.dumps({"begin": number}), flush=True)
        with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as room:
            what, outcome = open_one(specimens, seed, number, Path(room), classes)
        print(json.dumps({"end": number, "what": what, "outcome": outcome}), flush=True)


def results(specimens: Path, seed: int, first: int, count: int) -> Iterator[tuple[int, str, str]]:
    """Open files in processes of their own. Yield the number, the kind and the outcome of each."""
    at, end = first, first + count
    while at < end:
        command = [sys.executable, "-m", "tests.faults.hostile_files", "--work", str(specimens)]
        command += ["--seed", str(seed), "--first", str(at), "--files", str(end - at)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None and worker.stderr is not None
            while select.select([worker.stdout], [], [], 3 * MOST_SECONDS)[0] and (line := worker.stdout.readline()):
                told = json.loads(line)
                if "end" in told:
                    yield told["end"], told["what"], told["outcome"]
                    at = told["end"] + 1
            worker.kill()
            if at < end:
                yield at, "unknown", f"the process ended with {worker.wait()}: {worker.stderr.read()[-2000:]}"
                at += 1


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Open all files, and return the report."""
    began = time.monotonic()
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in sorted(OPENERS)}
    findings: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hostile-specimens-") as directory:
        make_specimens(Path(directory))
        for number, what, outcome in results(Path(directory), args.seed, args.first, args.files):
            kind = what.partition(",")[0]
            if outcome in ("read", "refused"):
                outcomes[kind][outcome] += 1
            else:
                again = f"python -m tests.faults.hostile_files --seed {args.seed} --first {number} --files 1"
                findings.append({"what": what, "why": outcome, "repeat": again})
                console.print(findings[-1])
            if number % 1000 == 0:
                console.print(f"{number} of {args.files}, {len(findings)} findings")
            if len(findings) >= MOST_FINDINGS:
                break
    done = sum(sum(counter.values()) for counter in outcomes.values()) + len(findings)
    seconds = round(time.monotonic() - began, 1)
    return {"seed": args.seed, "files": done, "outcomes": outcomes, "seconds": seconds, "findings": findings}


def main() -> None:
    """Run a campaign and print its report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hostile_files", description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first file")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    parser.add_argument("--json", action="store_true", help="print the report only")
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    if args.work is not None:
        with contextlib.suppress(BrokenPipeError):
            work(args.work, args.seed, args.first, args.files)
        return
    console = Console(stderr=True, quiet=args.json)
    console.print(f"seed {args.seed}")
    report = run(args, console)
    print(json.dumps(report, indent=None if args.json else 2))
    raise SystemExit(1 if report["findings"] else 0)


if __name__ == "__main__":
    main()
