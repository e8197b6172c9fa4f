"""The ranks of this node: their number, how they meet the ranks of other nodes, and their processes under torchrun.

This module must never start a store daemon, because store.py does so.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paramserver.contract.launcher import VARIABLE as LAUNCHER_VARIABLE
from paramserver.contract.printable import printable
from trainer_client.errors import ConfigError

DEFAULT_MASTER_PORT = 29500
OMP_VARIABLE = "OMP_NUM_THREADS"
_TORCHRUN = "torch.distributed.run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The way in which the nodes of a job meet, as the command's options describe it.

    Attributes:
        nodes: number of nodes.
        node_rank: number of this node; None: the rendezvous gives this node a number.
        master_addr, master_port: a host and a port of node 0.
        rdzv_endpoint: HOST:PORT of a rendezvous, the same on all nodes.
        rdzv_id: name of the job at the rendezvous.
    """

    nodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None

    def torchrun_options(self) -> list[str]:
        """Return the options of torchrun that say how the nodes meet.

        Raises:
            ConfigError: the options do not say how the nodes meet, or say it twice.
        """
        if self.rdzv_endpoint is not None:
            if self.master_addr is not None or self.master_port is not None:
                raise ConfigError("--rdzv-endpoint and --master-addr or --master-port are both given: choose one way")
            options = ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", self.rdzv_endpoint]
            return [*options, "--rdzv-id", self.rdzv_id or "paramserver"]
        if self.rdzv_id is not None:
            raise ConfigError("--rdzv-id needs --rdzv-endpoint HOST:PORT, the same on all nodes")
        if self.nodes == 1:
            if self.node_rank not in (None, 0):
                raise ConfigError(f"--node-rank {self.node_rank} with 1 node: give --nnodes, too")
            if self.master_addr is None and self.master_port is None:
                # With --standalone, torchrun chooses a free port.
                return ["--standalone"]
        elif self.node_rank is None or self.master_addr is None:
            raise ConfigError(
                f"--nnodes {self.nodes} needs --node-rank (0 to {self.nodes - 1}, another one on each node) and "
                "--master-addr (a host name of node 0), or --rdzv-endpoint HOST:PORT, the same on all nodes"
            )
        elif self.node_rank >= self.nodes:
            raise ConfigError(f"--node-rank {self.node_rank} is not below --nnodes {self.nodes}: the first node is 0")
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node_rank or 0)),
            *("--master-addr", self.master_addr or "127.0.0.1"),
            *("--master-port", str(DEFAULT_MASTER_PORT if self.master_port is None else self.master_port)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that the launch starts on this node, and how torchrun starts them; `run` starts them.

    Attributes:
        ranks: number of processes on this node.
        meeting: how the ranks of this node meet the ranks of other nodes.
        program: the script or module, and its arguments.
        is_module: whether the program is the name of a module.
        as_deepspeed: whether `import deepspeed` in the script imports this library.
        passes_local_rank: whether each rank's script gets `--local_rank=N`, if `as_deepspeed`.
        max_restarts: how often torchrun starts all ranks again after one has failed.
        log_dir: directory of a log of each rank, besides the console; None: the console alone.
        environment: variables that the ranks get, besides those of this process.
    """

    ranks: int
    meeting: Meeting
    program: Sequence[str]
    is_module: bool = False
    as_deepspeed: bool = False
    passes_local_rank: bool = True
    max_restarts: int = 0
    log_dir: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def torchrun_arguments(self) -> list[str]:
        """Return the arguments of torchrun. It can raise ConfigError; see Meeting."""
        options = [*self.meeting.torchrun_options(), "--nproc-per-node", str(self.ranks)]
        if self.max_restarts:
            options += ["--max-restarts", str(self.max_restarts)]
        if self.log_dir is not None:
            options += ["--log-dir", self.log_dir, "--tee", "3"]
        if self.as_deepspeed and self.is_module:
            raise ConfigError(
                "--as-deepspeed runs a script, and --module is given: write `import trainer_client.as_deepspeed` as "
                "the first line of the module instead"
            )
        if self.as_deepspeed:
            numbered = ["--local_rank"] if self.passes_local_rank else []
            return [*options, "-m", "trainer_client.as_deepspeed", *numbered, *self.program]
        return [*options, *(["-m"] if self.is_module else []), *self.program]

    def command(self) -> list[str]:
        """Return a shell command that starts the same ranks as `run`."""
        return [sys.executable, "-m", _TORCHRUN, *self.torchrun_arguments()]

    def run(self) -> int:
        """Run the ranks until they end, and return the exit status of the job.

        The exit status is 0 if all ranks ended with 0, else the status of the rank that failed first. It is 128 + N if
        signal N ended that rank, or this process. torchrun passes the signals that end this process on to the ranks. A
        SIGKILL of this process cannot be passed on. So an environment variable tells the ranks the id of this process,
        and each rank asks the kernel to end it when this process ends.
        """
        # torch's launcher is imported here and not at the top, because the import takes a second, and a user with a
        # wrong option does not have to wait for it.
        from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
        from torch.distributed.run import parse_args, run  # noqa: PLC0415

        os.environ.update({**self.environment, LAUNCHER_VARIABLE: str(os.getpid())})
        try:
            run(parse_args(self.torchrun_arguments()))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            _say(f"rank {rank} (pid {failure.pid}) failed first: {_how(failure.exitcode)}")
            return _status(failure.exitcode)
        except SignalException as error:
            _say(f"ended by {signal.Signals(error.sigval).name}; the ranks are stopped")
            return 128 + int(error.sigval)
        return 0


def default_ranks() -> int:
    """Return the number of GPUs of this node, or of its other accelerators, or 1 if it has none."""
    return torch.accelerator.device_count() or 1


def threads_for(ranks: int) -> int:
    """Return the number of threads for each of `ranks` ranks: an equal share of the processors, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _status(code: int) -> int:
    """Return the exit status that a shell shows for a code of `subprocess`: 128 + N if signal N ended the process."""
    return code if code >= 0 else 128 - code


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def _say(text: str) -> None:
    print(f"paramserver: {printable(text)}", file=sys.stderr, flush=True)
