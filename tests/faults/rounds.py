"""The frame of a campaign that strikes training runs in rounds until it has struck often enough.

Each round is played with a random generator of its own, which follows from the campaign's seed and the round's number,
so that the same seed gives the same choices. This module owns the command line and the report.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# The most strikes of one round.
STRIKES_OF_ROUND = 10

# A function that plays round `number` in a directory with at most so many strikes. It returns the findings: `kills` has
# the kinds of the strikes, and `error` is there if the round has failed.
Play = Callable[[int, Path, random.Random, int], dict[str, Any]]


def _sockets(directory: str, names: list[str]) -> list[str]:
    """Return which entries of a directory are sockets, which cannot be copied."""
    return [name for name in names if (Path(directory) / name).is_socket()]


def play_rounds(program: str, description: str | None, play: Play, strikes: int = STRIKES_OF_ROUND) -> NoReturn:
    """Play rounds as the command line says, print the report, and exit with status 1 if a round has failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--kills", type=int, default=strikes)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    parser.add_argument("--keep", type=Path, default=None, help="where the directories of failed rounds are kept")
    args = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    rounds: list[dict[str, Any]] = []
    left = args.kills
    with tempfile.TemporaryDirectory(prefix=f"{program.rpartition('.')[2]}-") as temporary:
        while left > 0:
            number = len(rounds)
            rng = random.Random(f"{seed} {number}")
            directory = Path(temporary) / str(number)
            played = play(number, directory, rng, min(STRIKES_OF_ROUND, left))
            if args.keep is not None and "error" in played:
                shutil.copytree(directory, args.keep / f"{seed}-{number}", ignore=_sockets)
            rounds.append(played)
            print(json.dumps(played), file=sys.stderr, flush=True)
            left -= max(1, len(played["kills"]))
    failed = [played for played in rounds if "error" in played]
    total = Counter(kind for played in rounds for kind in played["kills"])
    print(json.dumps({"seed": seed, "kills": total, "failed_rounds": len(failed), "rounds": rounds}, indent=2))
    raise SystemExit(1 if failed or total.total() < args.kills else 0)
