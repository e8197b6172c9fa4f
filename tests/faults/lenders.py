"""Strikes the lenders of a training run at random moments, and compares with a run without lenders.

`python -m tests.faults.lenders --strikes N --seed S`, as root. The run's daemon borrows memory of two other daemons,
and each of the three is in a network namespace of its own. The borrower's own copies in host memory are evicted all the
time, so that its reads go to the lenders. Each strike hits one lender:

- it is killed, and started again some time later;
- it is stopped with SIGSTOP, for longer or for shorter than the time-out of the borrower;
- its link is cut, for longer or for shorter than that;
- its link is slow: 1 MB/s;
- its operator lends less, or nothing, for some time (`lend_budget` and `paramserver-admin reload`);
- it lies for some time: it returns forged blocks, older blocks, or blocks of other places, and acknowledges bytes that
  it does not keep (`tests/faults/hostile_lender.py`).

Where namespaces or `tc` are not to be had, all daemons are on Unix sockets, and no link is cut or slow. The report says
so. Ten strikes make a round. The program prints a report in JSON at the end; the exit status is 1 if a rank ended, a
bit differs, no read was served by a lender, no lie was noticed, or bytes of a loan are left at a lender when the
borrower has stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from benchmarks.common.namespaces import NamespaceError, cut, join, shape, switched, unshape
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.faults.hostile_lender import lies_of
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.outliving import differences, make_plan, outlive
from tests.integration.support.ranks import Launch

STRIKES_OF_ROUND = 10
TIMEOUT_SECONDS = 0.25
HOSTS = ("10.94.8.1", "10.94.8.2", "10.94.8.3")
PORT = 7070
SLOW_GIGABYTES_PER_SECOND = 0.001
# A slow link that was idle sends this much at once: one packet of the largest size.
SLOW_BURST = "64kb"
# The shares of a time-out for which a lender is hit, at least and at most.
DURATIONS = {"kill": (0.2, 4.0), "stop": (1.5, 4.0), "pause": (0.1, 0.9), "empty": (0.5, 4.0), "shrink": (0.5, 4.0)}
LINK_DURATIONS = {"cut": (1.5, 12.0), "glitch": (0.1, 0.9), "slow": (0.5, 8.0)}
LIE_DURATIONS = {"forge": (0.5, 4.0), "replay": (0.5, 4.0), "lie": (0.5, 4.0)}
KINDS = tuple(DURATIONS)
LINK_KINDS = tuple(LINK_DURATIONS)
LIE_KINDS = tuple(LIE_DURATIONS)
EVICT_SECONDS = 0.02
# The time in which a lender must notice that its borrower was killed.
GONE_SECONDS = 10.0
CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme"},
    }
}


class LendingDaemon:
    """One lender, which can be hit and recovers.

    Attributes:
        address: the address at which it lends.
    """

    def __init__(self, state_dir: Path, namespace: str, address: str) -> None:
        """Start a lender in a network namespace; without one (""), it has its Unix socket only, and no address."""
        self._state_dir = state_dir
        self._namespace = namespace
        self._lies = lies_of(state_dir.with_name(f"{state_dir.name}.toml"))
        self._listens = {"listen": address, "insecure": True} if namespace else {}
        self.daemon = self._start()
        self.address = address if namespace else self.daemon.address
        self.recovery: Callable[[], object] | None = None
        self.recovers_at = 0.0

    def hit(self, kind: str, seconds: float) -> None:
        """Hit the lender, which recovers after some seconds."""
        self.recovers_at = time.monotonic() + seconds
        if kind == "kill":
            self.daemon.kill()
            self.recovery = self._restart
        elif kind in ("stop", "pause"):
            self.daemon.process.send_signal(signal.SIGSTOP)
            self.recovery = lambda: self.daemon.process.send_signal(signal.SIGCONT)
        elif kind in ("cut", "glitch"):
            cut(self._namespace)
            self.recovery = lambda: join(self._namespace)
        elif kind in LIE_KINDS:
            self._lies.write_text(kind)
            self.recovery = lambda: self._lies.write_text("")
        elif kind == "slow":
            refusal = shape([self._namespace], SLOW_GIGABYTES_PER_SECOND, burst=SLOW_BURST)
            assert refusal is None, refusal
            self.recovery = lambda: unshape([self._namespace])
        else:
            self._lend("1MiB" if kind == "shrink" else "0")
            self.recovery = lambda: self._lend("32MiB")

    def kill(self) -> None:
        """End the lender, also one that is stopped."""
        self.daemon.kill()

    def recover(self) -> None:
        """Undo the last hit, if there is one."""
        if self.recovery is not None:
            self.recovery()
            self.recovery = None

    def lent_bytes_left(self) -> int:
        """Return the bytes that are still lent when the lender has had time to see that its borrower is gone."""
        deadline = time.monotonic() + GONE_SECONDS
        while (lent := self._lent_bytes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return lent

    def _lent_bytes(self) -> int:
        with admin_of(self.daemon.address) as admin:
            accounts = admin.GetAccounts(admin_pb.GetAccountsRequest(), timeout=10).accounts
        host = next(account for account in accounts if account.tier == pb.TIER_HOST)
        return sum(holding.bytes for holding in host.holdings if holding.holder == "lent")

    def _start(self) -> Daemon:
        budgets = {"host_budget": "48MiB", "lend_budget": "32MiB"}
        module = "tests.faults.hostile_lender"
        return Daemon(self._state_dir, budgets | self._listens, module=module, namespace=self._namespace)

    def _restart(self) -> None:
        self.daemon = self._start()

    def _lend(self, budget: str) -> None:
        config = self._state_dir.with_name(f"{self._state_dir.name}.toml")
        lines = [line for line in config.read_text().splitlines() if not line.startswith("lend_budget")]
        config.write_text("\n".join([*lines, f'lend_budget = "{budget}"', ""]))
        with admin_of(self.daemon.address) as admin:
            admin.Reload(admin_pb.ReloadRequest(), timeout=10)


class Striker:
    """Hits lenders at random moments while the ranks train, and evicts the borrower's own copies all the time."""

    def __init__(self, lenders: list[LendingDaemon], kinds: list[str], rng: random.Random) -> None:
        self.strikes: list[str] = []
        self.served: Counter[str] = Counter()
        self._lenders = lenders
        self._kinds = kinds
        self._rng = rng
        self._next_at = time.monotonic() + rng.uniform(0.5, 2.0)
        self._evict_at = 0.0

    @property
    def is_done(self) -> bool:
        """Whether all strikes have been made, and all lenders have recovered."""
        return not self._kinds and all(lender.recovery is None for lender in self._lenders)

    def __call__(self, daemon: Daemon, _: Launch) -> None:
        """Do what is due. This is called every few milliseconds."""
        now = time.monotonic()
        if now >= self._evict_at:
            self._evict_at = now + EVICT_SECONDS
            self._look(daemon)
        for lender in self._lenders:
            if lender.recovery is not None and now >= lender.recovers_at:
                lender.recover()
        standing = [lender for lender in self._lenders if lender.recovery is None]
        if self._kinds and now >= self._next_at and standing:
            kind = self._kinds.pop(0)
            shares = (DURATIONS | LIE_DURATIONS | LINK_DURATIONS)[kind]
            self._rng.choice(standing).hit(kind, TIMEOUT_SECONDS * self._rng.uniform(*shares))
            self.strikes.append(kind)
            self._next_at = now + self._rng.uniform(0.05, 0.6)

    def _look(self, daemon: Daemon) -> None:
        """Evict the copies, and note what the lenders have served."""
        try:
            with admin_of(daemon.address) as admin:
                admin.EvictCopies(admin_pb.EvictCopiesRequest(all_jobs=True), timeout=10)
                tiers = admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10).tiers
        except grpc.RpcError:
            # The run has ended, and its daemon with it.
            return
        for lender in next(tier for tier in tiers if tier.tier == pb.TIER_REMOTE).lenders:
            for name in ("hits", "misses", "wrong_blocks", "timeouts", "losses"):
                self.served[f"{lender.address} {name}"] = getattr(lender, name)

    def total(self, name: str) -> int:
        """Return a figure of all lenders together, as the borrower's daemon had it last."""
        return sum(value for key, value in self.served.items() if key.endswith(f" {name}"))


def play(
    directory: Path, kinds: list[str], steps: int, whole: Any, rng: random.Random, *, apart: bool
) -> dict[str, Any]:
    """Run one round, and return the findings.

    Args:
        directory: an empty directory for the files of the round.
        kinds: the strikes, in order.
        steps: the number of steps to train.
        whole: the results of a run without lenders.
        rng: chooses moments and lenders.
        apart: whether the borrower and each lender are in network namespaces of their own; `cut` and `slow` need that.
    """
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        namespaces = stack.enter_context(switched(HOSTS)) if apart else [""] * len(HOSTS)
        lenders = [
            LendingDaemon(directory / f"lender-{number}", namespaces[number], f"{HOSTS[number]}:{PORT}")
            for number in range(1, len(HOSTS))
        ]
        for lender in lenders:
            # The lender's process changes when it is started again, so the present one is looked up at the end.
            stack.callback(LendingDaemon.kill, lender)
        remote = {
            "lenders": [lender.address for lender in lenders],
            "budget": "48MiB",
            "use": "always",
            "timeout_seconds": TIMEOUT_SECONDS,
            "retry_seconds": 0.1,
            "insecure": True,
        }
        where, daemon = directory / "run", {"remote": remote}
        plan = make_plan(where, CONFIG, steps=steps, daemon=daemon, namespace=namespaces[0])
        striker = Striker(lenders, list(kinds), rng)
        found: dict[str, Any] = {"steps": steps, "strikes": striker.strikes}
        try:
            results = outlive(plan, 1, striker)
        except AssertionError as error:
            return found | {"error": str(error)}
        for lender in lenders:
            lender.recover()
        left = [lender.lent_bytes_left() for lender in lenders]
    return found | {
        "not_made": striker._kinds,
        **{name: striker.total(name) for name in ("hits", "misses", "wrong_blocks", "timeouts", "losses")},
        "lent_bytes_left": left,
        "differences": differences(results, whole),
        "seconds": round(time.monotonic() - began, 1),
    }


def why_no_links() -> str | None:
    """Return the reason why daemons cannot be in namespaces here whose links are cut and slow; None if they can."""
    try:
        with switched(HOSTS[:1]) as namespaces:
            return shape(namespaces, SLOW_GIGABYTES_PER_SECOND, burst=SLOW_BURST)
    except NamespaceError as error:
        return str(error)


def train_without_lenders(directory: Path, steps: int) -> Any:
    """Return the results of the same run without lenders."""
    return outlive(make_plan(directory, CONFIG, steps=steps), 1)


def is_failed(found: dict[str, Any]) -> bool:
    """Return whether a round has found a fault."""
    return bool("error" in found or found["differences"] or not found["hits"] or any(found["lent_bytes_left"]))


def main() -> None:
    """Run the rounds, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.lenders", description=__doc__)
    parser.add_argument("--strikes", type=int, default=STRIKES_OF_ROUND)
    parser.add_argument("--steps", type=int, default=80, help="of each round; a round makes ten strikes")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    args = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    rounds: list[dict[str, Any]] = []
    left = args.strikes
    refusal = why_no_links()
    kinds_at_hand = KINDS + LIE_KINDS + (LINK_KINDS if refusal is None else ())
    with tempfile.TemporaryDirectory(prefix="lenders-") as temporary:
        whole = train_without_lenders(Path(temporary) / "whole", args.steps)
        while left > 0:
            rng = random.Random(f"{seed} {len(rounds)}")
            kinds = [rng.choice(kinds_at_hand) for _ in range(min(STRIKES_OF_ROUND, left))]
            played = play(Path(temporary) / str(len(rounds)), kinds, args.steps, whole, rng, apart=refusal is None)
            rounds.append(played)
            print(json.dumps(played), file=sys.stderr)
            left -= max(1, len(played["strikes"]))
    failed = [played for played in rounds if is_failed(played)]
    total = Counter(kind for played in rounds for kind in played["strikes"])
    wrong_blocks = sum(played.get("wrong_blocks", 0) for played in rounds)
    is_blind = any(total[kind] for kind in LIE_KINDS) and not wrong_blocks
    report = {
        "seed": seed,
        "no_links": refusal,
        "strikes": total,
        "wrong_blocks": wrong_blocks,
        "failed_rounds": len(failed),
        "rounds": rounds,
    }
    print(json.dumps(report, indent=2))
    raise SystemExit(1 if failed or is_blind or total.total() < args.strikes else 0)


if __name__ == "__main__":
    main()
