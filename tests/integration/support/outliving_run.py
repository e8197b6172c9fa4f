"""Training runs whose daemon is killed, by rank 0 at the plan's moments or by the test, or whose ranks stop themselves.

Run as a program: `python -m tests.integration.support.outliving_run PLANS.json`, with the environment of torchrun. The
ranks make one run after the other, and each rank writes its results of each run to a file. The training loop is an
ordinary one, without code for restarts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import trainer_client
from tests.integration.support.training import Run, build_model, make_optimizer, micro_batches, moments_of
from trainer_client.client.transport.job_calls import JobCalls
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.client.transport.step_calls import StepCalls

RUN = Run(dropout=0.1)

# The methods of a RankStore's parts whose calls are moments of step 0, by the names of the moments. An import has a
# RankStore of its own.
WATCHED: Mapping[str, tuple[type, str]] = {
    "confirm_epoch": (JobCalls, "confirm_epoch"),
    "open_job": (JobCalls, "open"),
    "begin_layout": (JobCalls, "begin_layout"),
    "register_shards": (JobCalls, "register_shards"),
    "roll_back": (JobCalls, "roll_back"),
    "put": (StepCalls, "put"),
    "acquire_write": (SlabLeases, "acquire_write"),
    "publish": (SlabLeases, "publish"),
    "commit": (StepCalls, "commit"),
}

# The daemon is killed this long after the begin of an operation, which takes a few milliseconds.
_WITHIN_SECONDS = 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a run, the same for every rank.

    Attributes:
        directory: the directory of the run's files.
        name: the name of the run, which is part of the names of its files.
        lock_file: the lock in the daemon's state directory, which contains the daemon's pid.
        addresses: the address of each rank's daemon if the ranks are on several nodes; empty: the config has it.
        kills: the moments at which rank 0 kills the daemon: (step, name of a moment). The moments of step 0 are within
            `initialize`, before or after a call of the store: "before put 1" is before the second `put`.
        stops: the moments at which each rank stops itself with SIGSTOP.
        first_step: the step that the run begins or resumes with.
        goes_on: whether the run begins with the step after the job's last one instead.
        only_trains: whether the run makes neither evaluations, which use random numbers after a commit, nor changes by
            hand. A run that is started again behind that commit would not repeat them.
        derives: whether the model is built without memory, so that its first values are computed from recipes.
        checkpoint: the checkpoint that `initialize` imports if the job has no step; None: no checkpoint.
        layers: the number of layers of the model.
        daemon: keys of the daemon's config that differ from DAEMON.
        namespace: the network namespace of the daemon; "": that of the tests. The ranks reach it by its Unix socket.
    """

    directory: str
    name: str
    lock_file: str
    steps: int
    accumulation: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    prefer_streams: bool = False
    addresses: list[str] = field(default_factory=list)
    kills: list[tuple[int, str]] = field(default_factory=list)
    stops: list[tuple[int, str]] = field(default_factory=list)
    first_step: int = 1
    goes_on: bool = False
    only_trains: bool = False
    derives: bool = False
    checkpoint: str | None = None
    layers: int = 3
    daemon: dict[str, Any] = field(default_factory=dict)
    namespace: str = ""

    def results_file(self, rank: int) -> Path:
        return Path(self.directory) / f"results-{self.name}-{rank}.pt"

    def progress_file(self, rank: int) -> Path:
        return Path(self.directory) / f"progress-{self.name}-{rank}"


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a method that calls `function` with a name before its own arguments."""
    return lambda *args, **options: function(name, *args, **options)


class Killer:
    """Kills the daemon or stops this process once at each moment of the plan, and writes the rank's present moment to
    its progress file.

    A moment is a step and the name of a place in the training loop, such as (3, "forward").
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._progress = plan.progress_file(rank).open("w", buffering=1)
        self._lock_file = Path(plan.lock_file)
        self._waiting = {(step, moment) for step, moment in plan.kills} if rank == 0 else set()
        self._stops = {(step, moment) for step, moment in plan.stops}

    def at(self, step: int, moment: str, *, pause_seconds: float = 0.0) -> None:
        """Note that the run has come to a moment, and kill the daemon or stop this process if the plan says so.

        The pause before the kill lets other ranks get further. The pause after it gives this rank's client time to
        notice that the daemon is dead.
        """
        self._progress.write(f"{step} {moment}\n")
        if (step, moment) in self._stops:
            self._stops.discard((step, moment))
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._take(step, moment):
            time.sleep(pause_seconds)
            self._kill()
            time.sleep(pause_seconds)

    @contextmanager
    def watching(self, watched: Mapping[str, tuple[type, str]]) -> Iterator[None]:
        """Make the begin and the end of each call of these methods a moment of step 0."""
        methods = {name: getattr(owner, method) for name, (owner, method) in watched.items()}
        counts = Counter[str]()

        def call(name: str, owner: Any, *args: Any, **options: Any) -> Any:
            number, counts[name] = counts[name], counts[name] + 1
            self.at(0, f"before {name} {number}")
            result = methods[name](owner, *args, **options)
            self.at(0, f"after {name} {number}")
            return result

        for name, (owner, method) in watched.items():
            setattr(owner, method, _named(call, name))
        try:
            yield
        finally:
            for name, (owner, method) in watched.items():
                setattr(owner, method, methods[name])

    @contextmanager
    def within(self, step: int, moment: str) -> Iterator[None]:
        """Note that the run is within a moment, and kill the daemon during the block if the plan says so."""
        self._progress.write(f"{step} {moment}\n")
        timer = threading.Timer(_WITHIN_SECONDS, self._kill) if self._take(step, moment) else None
        if timer is not None:
            timer.start()
        yield
        if timer is not None:
            timer.join()

    def close(self) -> None:
        self._progress.close()

    def _take(self, step: int, moment: str) -> bool:
        wanted = (step, moment) in self._waiting
        self._waiting.discard((step, moment))
        return wanted

    def _kill(self) -> None:
        """Kill the daemon that has taken the lock last, unless it has ended and the next one is still starting."""
        with suppress(ProcessLookupError):
            os.kill(int(self._lock_file.read_text()), signal.SIGKILL)


class Schedule(LambdaLR):
    """A schedule whose `step` is a moment: it is between the hand-over of gradients and the vote for their commit."""

    def __init__(self, optimizer: torch.optim.Optimizer, killer: Killer) -> None:
        self._killer = killer
        super().__init__(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.97**step)

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self._killer.at(self.last_epoch, "before vote", pause_seconds=0.3)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_killer"}


def start(plan: Plan, rank: int, killer: Killer) -> tuple[trainer_client.Engine, Any]:
    """Return the engine, and the block of the model whose forward and backward are moments."""
    with trainer_client.zero.Init(seed=5) if plan.derives else nullcontext():
        model = build_model(replace(RUN, layers=plan.layers))
    optimizer, _ = make_optimizer(model, RUN)
    config = plan.config | {"gradient_accumulation_steps": plan.accumulation}
    if plan.addresses:
        config["paramserver"] = config["paramserver"] | {"address": plan.addresses[rank]}
    with killer.watching(WATCHED):
        engine, *_ = trainer_client.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=Schedule(optimizer, killer),
            config=config,
            checkpoint=plan.checkpoint,
            prefer_streams=plan.prefer_streams,
        )
    return engine, model.transformer.h[1]


def run_rank(plan: Plan) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    killer = Killer(plan, rank)
    engine, block = start(plan, rank, killer)
    # The number of the present step, and whether the present forward is an evaluation.
    here = [0, False]

    def before_block(*_: Any) -> None:
        killer.at(here[0], "evaluation" if here[1] else "forward")

    def after_block(_: Any, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(lambda _: killer.at(here[0], "backward"))

    block.register_forward_pre_hook(before_block)
    block.register_forward_hook(after_block)
    if engine.global_steps == 0 or not plan.goes_on:
        # A run that goes on has the random numbers of the last one.
        torch.manual_seed(3 + rank)
    batches = list(micro_batches(plan.steps * plan.accumulation, rank, world_size))
    losses, evaluations = [], []
    with engine, closing(killer):
        first_step = engine.global_steps + 1 if plan.goes_on else plan.first_step
        for step in range(first_step, plan.steps + 1):
            here[0] = step
            for index in range(plan.accumulation):
                batch = batches[(step - 1) * plan.accumulation + index]
                loss = engine(input_ids=batch, labels=batch).loss
                killer.at(step, f"after forward {index}")
                engine.backward(loss)
                losses.append(loss.item())
                killer.at(step, f"after backward {index}")
                with killer.within(step, "step"):
                    engine.step()
            killer.at(step, "after step")
            if step % 2 == 0 and not plan.only_trains:
                here[1] = True
                with torch.no_grad():
                    evaluations.append(engine(input_ids=batch, labels=batch).loss.item())
                here[1] = False
            if step % 3 == 0 and not plan.only_trains:
                with killer.within(step, "change"):
                    engine.set_full("transformer.h.0.ln_1.weight", "param", torch.full((64,), 1.0 + step / 100))
                with killer.within(step, "reading"):
                    weight = engine.get_full("transformer.h.2.ln_1.weight", "exp_avg")
                    assert weight is not None
                    evaluations.append(weight.sum().item())
        killer.at(plan.steps, "end")
        weights = engine.full_state_dict()
        moments = moments_of(engine)
        assert engine.global_steps == plan.steps
        killer.at(plan.steps, "close")
    report = engine.step_report()
    result = {
        "losses": losses,
        "evaluations": evaluations,
        "weights": weights,
        "moments": moments,
        "restarts": [[restart.seconds, restart.step, restart.handed_over_again] for restart in engine.daemon_restarts],
        "report": None if report is None else report.to_dict(),
    }
    torch.save(result, plan.results_file(rank))


def main() -> None:
    dist.init_process_group("gloo")
    try:
        for plan in json.loads(Path(sys.argv[1]).read_text()):
            run_rank(Plan(**plan))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
