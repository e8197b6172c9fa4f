"""Everyday surroundings: the changes that shells, schedulers, containers and clusters make to a process before it
starts. In each of them a daemon serves, ends cleanly and starts again. In those that reach a trainer, a trainer trains.

Several cases run at the same time, because most of a process's time here is the import of torch.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import ROOT
from trainer_client import StoreClientSync

AT_A_TIME = 3
TRAIN_SECONDS = 300.0

TRAIN = """
import sys, torch, trainer_client
nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    "paramserver": {"host_budget": "64MiB", "nvme_budget": "256MiB"},
}
torch.manual_seed(1)
with trainer_client.initialize(model=torch.nn.Linear(4, 1), config=config)[0] as engine:
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    engine.wait_for_commit()
sys.exit(0 if engine.global_steps == 2 else 9)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrounding:
    """The differences to the surroundings of the tests.

    Attributes:
        variables: changed environment variables; None removes a variable.
        shell: a script that runs the program "$@" in the shell's own process; $0 is a directory.
        empty: whether the environment has no variables but `variables`.
        state_dir: the name of the state directory.
        needs_namespace: whether the shell makes a namespace, which some systems forbid.
    """

    variables: Mapping[str, str | None] = field(default_factory=dict)
    shell: str = 'exec "$@"'
    empty: bool = False
    state_dir: str = "state"
    needs_namespace: bool = False

    def environment(self, usual: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the process, where `usual` is the environment of the tests."""
        changed = {} if self.empty else dict(usual)
        for name, value in self.variables.items():
            changed.pop(name, None)
            if value is not None:
                changed[name] = value
        return changed

    def prefix(self, directory: Path) -> list[str]:
        """Return the words before the program's command. The shell script finds `directory` in $0, and may use it."""
        return ["/bin/sh", "-c", self.shell, str(directory)]


CLOSED = 'exec "$@" <&- >&- 2>&-'
DELETED = 'mkdir "$0/gone" && cd "$0/gone" && rmdir "$0/gone" && exec "$@"'
BROKEN = 'mkfifo "$0/pipe"; : <"$0/pipe" & exec >"$0/pipe" 2>&1; rm "$0/pipe"; exec "$@"'
OPTIMISED = 'python=$1; shift; exec "$python" -OO "$@"'
NO_SHARED_MEMORY = """exec unshare --mount /bin/sh -c 'mount -t tmpfs -o ro none /dev/shm && exec "$@"' sh "$@\""""
DEAD_PROXY = "http://127.0.0.1:9"

# The import of torch is most of what a case costs. So surroundings share a case if they act on different things, such
# as the locale and the mode of files. A surrounding that hides the daemon's output shares with no other one.
FOR_DAEMONS = {
    "C locale, umask 000": Surrounding(variables={"LC_ALL": "C", "LANG": None}, shell='umask 000; exec "$@"'),
    "ASCII locale, closed stdin": Surrounding(
        variables={"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, shell='exec "$@" <&-'
    ),
    "Turkish locale, odd time zone, 256 descriptors, no core, no locked memory": Surrounding(
        variables={"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati"},
        # dash takes one limit at a time. The case fails if a limit is refused.
        shell='ulimit -n 256 && ulimit -c 0 && ulimit -l 0 && exec "$@"',
    ),
    "no HOME, no PATH, signals that are ignored, as by nohup and &": Surrounding(
        variables={"HOME": None, "USER": None, "LOGNAME": None, "PATH": None},
        shell="trap '' HUP INT QUIT TERM PIPE; exec \"$@\"",
    ),
    "HOME and TMPDIR that are not there, deleted working directory": Surrounding(
        variables={"HOME": "/nonexistent", "TMPDIR": "/nonexistent"}, shell=DELETED
    ),
    # With the lowest priority, 19, a start would take minutes on a busy machine, because the process gets a hundredth
    # of a core.
    "empty environment, umask 077, lower priority": Surrounding(empty=True, shell='umask 077; exec nice -n 5 "$@"'),
    "warnings as errors": Surrounding(variables={"PYTHONWARNINGS": "error"}),
    "-OO, spaces and letters in the path": Surrounding(
        shell=OPTIMISED, state_dir="Zust\xe4nde von  heute \N{SNOWMAN} 100%"
    ),
    "development mode, Python's switches": Surrounding(
        variables={
            **{"PYTHONDEVMODE": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            **{"PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1", "PYTHONFAULTHANDLER": "1"},
        }
    ),
    "all streams closed": Surrounding(shell=CLOSED),
    "full output": Surrounding(shell='exec "$@" >/dev/full 2>&1'),
    "closed pipe as output": Surrounding(shell=BROKEN),
    "libraries' switches, read-only working directory": Surrounding(
        variables={
            **{"OMP_NUM_THREADS": "3", "MALLOC_ARENA_MAX": "1", "MALLOC_PERTURB_": "165"},
            **{"GRPC_VERBOSITY": "debug", "http_proxy": DEAD_PROXY, "https_proxy": DEAD_PROXY},
        },
        shell='cd /proc && exec "$@"',
    ),
    "no shared memory directory": Surrounding(shell=NO_SHARED_MEMORY, needs_namespace=True),
}
FOR_TRAINERS = {
    "warnings as errors": FOR_DAEMONS["warnings as errors"],
    "-OO, 256 descriptors, empty environment, read-only working directory": Surrounding(
        empty=True, shell=f"cd /proc; ulimit -n 256; {OPTIMISED}"
    ),
    "all streams closed": FOR_DAEMONS["all streams closed"],
    "no network, not even loopback": Surrounding(shell='exec unshare --net "$@"', needs_namespace=True),
}


def serve(surrounding: Surrounding, usual: Mapping[str, str], directory: Path) -> None:
    """Start a daemon twice in the same state directory, and each time put, commit and get through it."""
    weight = {"w": torch.zeros(1000)}
    for value in (1.0, 2.0):
        prefix, environment = surrounding.prefix(directory), surrounding.environment(usual)
        with Daemon(directory / surrounding.state_dir, prefix=prefix, environment=environment) as daemon:
            with StoreClientSync.connect(daemon.address) as client:
                assert client.maps_memory
                assert value == 1.0 or weight_of(client) == 1.0, "what was committed before the restart"
                with client.open("job", weight) as job:
                    job.put({"w": torch.full((1000,), value)})
                    job.commit()
                assert weight_of(client) == value
            made = [daemon.state_dir, *daemon.state_dir.iterdir()]
            assert [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
            assert daemon.stop() == 0, daemon.log
            assert not daemon.socket.exists() and "Traceback" not in daemon.log, daemon.log


def weight_of(client: StoreClientSync) -> float:
    with client.read("job") as reader:
        weight = reader.get("w")
    assert bool((weight == weight[0]).all())
    return float(weight[0])


def train(surrounding: Surrounding, usual: Mapping[str, str], directory: Path) -> None:
    """Train two steps with a daemon that the trainer starts."""
    script, state_dir, output = directory / "train.py", directory / surrounding.state_dir, directory / "output"
    script.write_text(TRAIN)
    with output.open("w") as file:
        ended = subprocess.run(
            [*surrounding.prefix(directory), sys.executable, str(script), str(state_dir)],
            cwd=ROOT,
            env=surrounding.environment(usual),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=TRAIN_SECONDS,
            check=False,
        )
    log = state_dir / "daemon.log"
    told = f"{output.read_text()}\n{log.read_text() if log.exists() else 'no daemon was started'}"
    assert ended.returncode == 0 and "Traceback" not in told, told


CASES = {f"daemon: {name}": (serve, surrounding) for name, surrounding in FOR_DAEMONS.items()} | {
    f"trainer: {name}": (train, surrounding) for name, surrounding in FOR_TRAINERS.items()
}


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[None]]]:
    """The outcomes of the chosen cases. Several cases run at the same time, in the order of the tests."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [str(item.callspec.params["case"]) for item in items if item.module is request.module]
    # This is a copy because pytest changes an environment variable in each test, and a process that starts meanwhile
    # could miss it.
    usual = dict(os.environ)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        started: dict[str, Future[None]] = {}
        for number, name in enumerate(names):
            run, surrounding = CASES[name]
            if not surrounding.needs_namespace or may_mount():
                started[name] = pool.submit(run, surrounding, usual, tmp_path_factory.mktemp(f"case-{number}"))
        yield started
        for outcome in started.values():
            outcome.cancel()


def may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize("case", CASES)
def test_it_works(outcomes: Mapping[str, Future[None]], case: str) -> None:
    if case not in outcomes:
        pytest.skip("mount namespaces are not to be had here")
    outcomes[case].result()
