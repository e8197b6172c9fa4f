"""One rank of a job on two nodes, which stops or dies at a moment that a test chooses.

`python -m tests.integration.support.settling_ranks PLAN.json DIRECTORY`, with torchrun's environment variables. Each
rank writes what it has seen to DIRECTORY/seen-RANK.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

import trainer_client
from paramserver.contract import silence
from tests.integration.support.training import MICRO_BATCH, Run, build_model, make_optimizer, micro_batches
from trainer_client import StoreClientSync

RUN = Run(layers=1)
# The longest time for which a rank waits for a file of the test.
WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the ranks do.

    Attributes:
        job: the name of the job.
        addresses: the address of each rank's daemon.
        until: the number of the last step.
        dies: the step before whose vote rank 1 kills itself; 0: it does not.
        stops: the step before whose vote rank 0 waits for the file `go-on`; 0: it does not.
        pauses: the step after which rank 0 waits for the file `go-on`; 0: it does not.
        section: the section `paramserver` of the config.
        home: where all states live.
        stage: the stage of ZeRO.
        seed: if given, each rank waits for a third of its commits, chosen at random, instead of rank 0 for all of them,
            and writes the steps that were safe then to DIRECTORY/safe-RANK.txt as they come, and each loss, with the
            step before it, to DIRECTORY/losses-RANK.txt.
        has_barriers: whether the script makes barriers in its own process group, which have the time-out of that group.
        silent_after_seconds: how long another rank may be silent, which programs cannot set.
    """

    job: str
    addresses: tuple[str, ...]
    until: int
    dies: int = 0
    stops: int = 0
    pauses: int = 0
    section: Mapping[str, Any] = field(default_factory=dict)
    home: str = "nvme"
    stage: int = 3
    seed: int | None = None
    has_barriers: bool = True
    silent_after_seconds: float = silence.RANK_SECONDS


class Moment(dict[str, int]):
    """A value of the user's client state that calls a function when it is encoded.

    That is just before the vote, when `engine.global_steps` counts the step already, and once at the beginning of the
    step, when the engine looks whether the state can be committed.
    """

    def __init__(self, act: Any) -> None:
        super().__init__(steps=0)
        self._act = act

    def __iter__(self) -> Iterator[str]:
        self._act()
        return super().__iter__()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def note(path: Path, line: object) -> None:
    """Append a line to a file, which another process reads when this one was killed."""
    with path.open("a") as file:
        file.write(f"{line}\n")


def newest_at(address: str, job: str) -> int | None:
    """Return the step that a reader of a store gets that names none."""
    with StoreClientSync.connect(address) as client:
        return next((stored.step for stored in client.list_jobs() if stored.name == job), None)


def train(plan: Plan, directory: Path) -> dict[str, Any]:
    """Train to the end of the plan, and return what this rank has seen."""
    silence.RANK_SECONDS = plan.silent_after_seconds
    rank = dist.get_rank()
    seen: dict[str, Any] = {"settled": []}
    model = build_model(RUN)
    optimizer, _ = make_optimizer(model, RUN)
    offload = {"device": plan.home}
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_optimization": {"stage": plan.stage, "offload_optimizer": offload}
        | ({"offload_param": offload} if plan.stage == 3 else {}),
        "paramserver": {"job": plan.job, "address": plan.addresses[rank], **plan.section},
    }
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=config)
    seen["resumed"] = engine.resumed_step
    note(directory / f"resumed-{rank}.txt", engine.resumed_step)
    rng = None if plan.seed is None else random.Random(f"{plan.seed} {rank} {engine.resumed_step}")

    def before_vote() -> None:
        if rank == 1 and 0 < plan.dies == engine.global_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and 0 < plan.stops == engine.global_steps:
            (directory / "stopped").touch()
            wait_for(directory / "go-on")

    batches = list(micro_batches(plan.until, rank, dist.get_world_size()))
    with engine:
        while engine.global_steps < plan.until:
            batch = batches[engine.global_steps]
            loss = engine(input_ids=batch, labels=batch).loss
            if rng is not None:
                note(directory / f"losses-{rank}.txt", f"{engine.global_steps} {loss.item().hex()}")
            engine.backward(loss)
            engine.client_state["moment"] = Moment(before_vote)
            engine.step()
            if rng is not None and rng.random() < 1 / 3:
                engine.wait_for_commit()
                note(directory / f"safe-{rank}.txt", engine.global_steps)
            # Only rank 0 waits. Rank 1 is in the next step, at a barrier of the script, or at its end meanwhile.
            if rank == 0 and rng is None:
                try:
                    engine.wait_for_commit()
                except trainer_client.CollectiveError as error:
                    seen["raised"] = [engine.global_steps, str(error)]
                    (directory / f"seen-{rank}.json").write_text(json.dumps(seen))
                    raise
                seen["settled"].append([engine.global_steps, newest_at(plan.addresses[0], plan.job)])
                if engine.global_steps == plan.pauses:
                    (directory / "paused").touch()
                    wait_for(directory / "go-on")
            if plan.has_barriers and engine.global_steps % 2:
                dist.barrier()
    return seen


def main() -> None:
    plan_path, directory = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    seen = train(Plan(**json.loads(plan_path.read_text())), directory)
    (directory / f"seen-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
