"""Silences nodes, links, daemons and trainers of a job at random moments, and looks for what docs/silence.md forbids.

`python -m tests.faults.silence --kills N --seed S`, as root. Two or three nodes are network namespaces with a daemon
and a rank each. Each round trains with the next cell of partial.py until it is finished. Strikes fall into each start
of the job until one of them ends it:

- `cut`: the link of a node is cut; `mute`: what the node sends is lost; `deaf`: what others send to it is lost;
- `slow`: the link of a node carries 1 MB/s;
- `trainer`, `daemon`, `node`: the trainer of a node is stopped with SIGSTOP, or its daemon, or both;
- `kill trainer`, `kill daemon`, `kill node`: they are killed. The daemon is started again.

All but the kills are short or `long`. Times are smaller than the product's: a rank counts as silent after
SILENT_SECONDS, and a session ends after HEARTBEAT_SECONDS. After strikes that are short or hit daemons only, the run
goes on. After any other, each rank that lives ends by itself with one of LAST_WORDS, while the strike lasts. The job is
started again then. The round fails if a rank ends otherwise or not at all, if the next start goes on from an earlier
step than one that was called safe, or if the bits at the end are not those of a quiet run.
Prints a report in JSON; the exit status is 1 if a round has failed.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.namespaces import cut, join, mute, shape, switched, unmute, unshape
from tests.faults.partial import CELLS, MODULE, STEPS, Cell, Round
from tests.faults.rounds import play_rounds
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import Launch
from tests.integration.support.settling_ranks import Plan

HOSTS = ("10.94.9.1", "10.94.9.2", "10.94.9.3")
PORT = 7070
SLOW_GIGABYTES_PER_SECOND = 0.001
SLOW_BURST = "64kb"
SILENT_SECONDS = 6.0
HEARTBEAT_SECONDS = 4.0
SHORT_SECONDS = (0.1, 1.2)
# Strikes that follow each other at once are together shorter than each of the times above. Then all go on for a while.
MOST_SHORT_SECONDS = 2.0
SETTLE_SECONDS = 2.0
# A daemon may be silent for longer than its trainers' sessions would last without it.
DAEMON_SECONDS = (0.1, HEARTBEAT_SECONDS + 2.0)
LINKS = ("cut", "mute", "deaf")
KINDS = (
    *(f"{length}{kind}" for kind in (*LINKS, "trainer", "node") for length in ("", "long ")),
    *("slow", "daemon", "kill trainer", "kill daemon", "kill node"),
)
# After the first commit of a launch, or the last strike, a strike comes within so many seconds.
WITHIN_SECONDS = 1.0
# The ranks must end within this time of a strike that ends them.
END_SECONDS = 120.0
LAST_WORDS = ("CollectiveError: ", "SessionEndedError: ", "StepAbortedError: ", "DaemonRestartedError: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A strike at one node.

    Attributes:
        kind: one of KINDS.
        node: the number of the node.
        seconds: how long it lasts, unless it ends the run.
    """

    kind: str
    node: int
    seconds: float

    @classmethod
    def choose(cls, nodes: int, rng: random.Random) -> Strike:
        kind = rng.choice(KINDS)
        return cls(kind=kind, node=rng.randrange(nodes), seconds=rng.uniform(*times_of(kind)))

    @property
    def ends(self) -> bool:
        """Whether all ranks end."""
        return self.kind.startswith("long ") or self.kind in ("kill trainer", "kill node")

    @property
    def silences(self) -> tuple[str, ...]:
        """The processes of the node that stand still or are killed."""
        processes: dict[str, Any] = {"trainer": ("trainer",), "daemon": ("daemon",), "node": ("trainer", "daemon")}
        return processes.get(self.kind.rpartition(" ")[2], ())


def kill_all(daemons: list[Daemon]) -> None:
    """Kill the daemons that are in the list now; a daemon is replaced there when it is started again."""
    for daemon in daemons:
        daemon.kill()


def times_of(kind: str) -> tuple[float, float]:
    return DAEMON_SECONDS if kind == "daemon" else SHORT_SECONDS


class SilentRound(Round):
    """A round on nodes that are network namespaces."""

    def __init__(self, directory: Path, cell: Cell, rng: random.Random, steps: int, nodes: int) -> None:
        super().__init__(directory, cell, rng, steps, nodes)
        self.seconds_until_the_end: list[float] = []
        self._hosts = HOSTS[:nodes]
        self._namespaces: list[str] = []

    @contextmanager
    def serving(self) -> Iterator[list[Daemon]]:
        with ExitStack() as stack:
            self._namespaces = stack.enter_context(switched(self._hosts))
            daemons: list[Daemon] = []
            stack.callback(kill_all, daemons)
            for number in range(self._ranks):
                state = self._directory / f"node-{number}" / "state"
                state.parent.mkdir()
                daemons.append(self._start(number, state))
            yield daemons

    def plan(self, daemons: list[Daemon]) -> Plan:
        plan = super().plan(daemons)
        section = dict(plan.section)
        if self._cell.replicated:
            section["replica"] = {"addresses": [f"{host}:{PORT}" for host in self._hosts]}
        return replace(plan, section=section, has_barriers=False, silent_after_seconds=SILENT_SECONDS)

    def launch(self, path: Path) -> Launch:
        arguments = (path, self._directory)
        return Launch(
            MODULE, self._ranks, arguments, self._directory, namespaces=self._namespaces, master=self._hosts[0]
        )

    def strike(self, daemons: list[Daemon], launch: Launch, most_kills: int) -> bool:
        """Strike a launch, wait for its end, and return whether it has finished the training."""
        launches = len(self.noted("resumed", rank=0))
        made: list[Strike] = []
        unsettled = 0.0
        with ExitStack() as lasting:
            while len(self.kills) < most_kills and self.wait_for_start(launch, launches):
                if unsettled > MOST_SHORT_SECONDS:
                    time.sleep(SETTLE_SECONDS)
                    unsettled = 0.0
                time.sleep(self._rng.uniform(0.0, WITHIN_SECONDS))
                if not launch.is_whole:
                    break
                strike = Strike.choose(self._ranks, self._rng)
                made.append(strike)
                self.kills.append(strike.kind)
                recover = self._begin(strike, daemons, launch)
                lasting.callback(recover)
                if strike.ends:
                    self._wait_for_the_end(strike, launch, f"{made}")
                    break
                time.sleep(strike.seconds)
                unsettled += strike.seconds
                lasting.pop_all().close()
        codes = launch.wait(END_SECONDS)
        shown = f"exit codes {codes} after {made}\n{launch.output()}"
        if not any(strike.ends for strike in made):
            assert codes == [0] * self._ranks, shown
        killed = {strike.node for strike in made if strike.kind in ("kill trainer", "kill node")}
        for rank, code in enumerate(codes):
            log = (self._directory / f"rank-{rank}.log").read_text()
            ended_well = code == 0 or (code == 1 and any(words in log for words in LAST_WORDS))
            assert ended_well or (rank in killed and code == -signal.SIGKILL), shown
        return codes == [0] * self._ranks

    def _wait_for_the_end(self, strike: Strike, launch: Launch, made: str) -> None:
        """Wait until all ranks but one that stands still have ended, while the strike lasts."""
        began = time.monotonic()
        others = [rank for number, rank in enumerate(launch.ranks) if number != strike.node or not strike.silences]
        while any(rank.poll() is None for rank in others):
            if time.monotonic() > began + END_SECONDS:
                raise AssertionError(f"a rank does not end after {made}\n{launch.stacks()}")
            time.sleep(0.02)
        self.seconds_until_the_end.append(round(time.monotonic() - began, 1))

    def _begin(self, strike: Strike, daemons: list[Daemon], launch: Launch) -> Callable[[], object]:
        """Begin a strike, and return what ends it."""
        number, namespace = strike.node, self._namespaces[strike.node]
        others = [place for place in range(self._ranks) if place != number]
        processes: dict[str, Any] = {"trainer": launch.ranks[number], "daemon": daemons[number].process}
        if strike.silences and strike.kind.startswith("kill "):
            for name in strike.silences:
                processes[name].kill()
                processes[name].wait()
            return lambda: self._revive(number, daemons)
        if strike.silences:
            for name in strike.silences:
                processes[name].send_signal(signal.SIGSTOP)
            return lambda: [processes[name].send_signal(signal.SIGCONT) for name in strike.silences]
        match strike.kind.rpartition(" ")[2]:
            case "cut":
                cut(namespace)
                return lambda: join(namespace)
            case "mute":
                hosts = [self._hosts[place] for place in others]
                mute(namespace, hosts)
                return lambda: unmute(namespace, hosts)
            case "deaf":
                for place in others:
                    mute(self._namespaces[place], [self._hosts[number]])
                return partial(self._hear, others, number)
        refusal = shape([namespace], SLOW_GIGABYTES_PER_SECOND, burst=SLOW_BURST)
        assert refusal is None, refusal
        return lambda: unshape([namespace])

    def _hear(self, others: list[int], number: int) -> None:
        for place in others:
            unmute(self._namespaces[place], [self._hosts[number]])

    def _revive(self, number: int, daemons: list[Daemon]) -> None:
        if daemons[number].process.poll() is not None:
            daemons[number] = self._start(number, daemons[number].state_dir)

    def _start(self, number: int, state: Path) -> Daemon:
        config = {
            "host_budget": "48MiB",
            "nvme_budget": "256MiB",
            "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
            "session_grace_seconds": 0.5,
            "listen": f"{self._hosts[number]}:{PORT}",
            "insecure": True,
        }
        return Daemon(state, config, namespace=self._namespaces[number])


def play(number: int, directory: Path, rng: random.Random, most_kills: int) -> dict[str, Any]:
    """Play a round with the next cell, on two nodes and on three in turn, and return the findings."""
    nodes = 2 + number % 2
    # The number of cells is even, so each pass through them gives a cell the other number of nodes.
    cell = CELLS[(number + number // len(CELLS)) % len(CELLS)]
    silent = SilentRound(directory, cell, rng, STEPS, nodes)
    found = silent.play(most_kills)
    return found | {"nodes": nodes, "seconds_until_the_end": silent.seconds_until_the_end}


def main() -> None:
    """Play the rounds, and print the report."""
    play_rounds("tests.faults.silence", __doc__, play)


if __name__ == "__main__":
    main()
