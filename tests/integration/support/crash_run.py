"""One rank of a training run that a test kills: it resumes its job, and writes its progress to a file.

Run as a program: `python -m tests.integration.support.crash_run PLAN.json`, with torchrun's environment
variables. Before each `engine.step()` a rank appends the step's number to its progress file. At the end rank 0 writes
the weights to a file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer_client
from tests.integration.support.training import Run, build_model, make_optimizer, micro_batches

RUN = Run(dropout=0.1, clipping=0.5, schedule=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a run, the same for every rank.

    Attributes:
        directory: gets the run's files.
        device: the device on which the model is built; empty: the CPU.
    """

    directory: str
    steps: int
    device: str = ""
    config: dict[str, Any] = field(default_factory=dict)

    def progress_file(self, rank: int) -> Path:
        return Path(self.directory) / f"progress-{rank}"

    @property
    def weights_file(self) -> Path:
        return Path(self.directory) / "weights.pt"

    @property
    def starts_file(self) -> Path:
        return Path(self.directory) / "starts"


def run_rank(plan: Plan) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model(replace(RUN, device=plan.device))
    optimizer, scheduler = make_optimizer(model, RUN)
    config = plan.config | {"gradient_clipping": RUN.clipping}
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    if engine.resumed_step == 0:
        torch.manual_seed(3 + rank)
    if rank == 0:
        with plan.starts_file.open("a") as starts:
            starts.write(f"{engine.resumed_step}\n")
    batches = list(micro_batches(plan.steps, rank, world_size))
    with engine, plan.progress_file(rank).open("a", buffering=1) as progress:
        for tokens in batches[engine.resumed_step :]:
            batch = tokens.to(engine.device)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            progress.write(f"{engine.global_steps + 1}\n")
            engine.step()
        weights = engine.full_state_dict(rank0_only=True)
        if rank == 0:
            torch.save(weights, plan.weights_file)


def main() -> None:
    dist.init_process_group("gloo")
    run_rank(Plan(**json.loads(Path(sys.argv[1]).read_text())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
