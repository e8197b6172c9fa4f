"""Training runs on the simulated device, and their comparison with runs on the CPU.

As a program, it is one rank of a launch: `python -m tests.device.training PLAN.json RESULTS.pt`, with torchrun's
environment variables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_client
from tests.device import lag
from tests.device.guarded_arena import guarded_arena
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import (
    Result,
    Run,
    build_model,
    engine_config,
    make_optimizer,
    micro_batches,
)

# Kernels add in another order on the device than on the CPU, because their results are laid out as a GPU's are.
RELATIVE = 1e-4


def train_on_device(run: Run, address: str, job: str, tier: str, schedule: lag.Schedule) -> Result:
    """Train as `train_through_store` does, at ZeRO stage 3 on the device, with all states on one tier.

    Leases are guarded, and the run fails if it has a race.
    """
    lag.reset()
    schedule.use()
    with guarded_arena():
        result = _train(run, address, job, tier)
    assert [str(race) for race in lag.races()] == []
    return result


def _train(run: Run, address: str, job: str, tier: str) -> Result:
    # The model is moved first: torch refuses `parameter.data = tensor_of_another_device` for a device of this kind.
    model = build_model(run).to("lag")
    optimizer, scheduler = make_optimizer(model, run)
    config = engine_config(replace(run, config=config_of(address, job, tier)))
    config["paramserver"]["device"] = "lag"
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    losses, norms = [], []
    with engine:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        assert engine.device == torch.device("lag", rank)
        torch.manual_seed(3 + rank)
        for tokens in micro_batches(run.steps * run.accumulation, rank, world_size):
            batch = tokens.to(engine.device)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append((loss / run.accumulation).item())
            norm = engine.get_global_grad_norm()
            if run.clipping and norm is not None and engine.micro_steps % run.accumulation == 0:
                norms.append(float(norm))
        return Result(losses=losses, norms=norms, weights=engine.full_state_dict(), skipped=engine.skipped_steps)


def assert_close(actual: Result, expected: Result) -> None:
    """Compare two results to rounding.

    Weights are compared by the norm of the difference, because AdamW turns the rounding of a gradient that is nearly
    zero into a difference of some thousandths of the learning rate.
    """
    assert actual.skipped == expected.skipped
    torch.testing.assert_close(torch.tensor(actual.losses), torch.tensor(expected.losses), rtol=RELATIVE, atol=0)
    torch.testing.assert_close(torch.tensor(actual.norms), torch.tensor(expected.norms), rtol=RELATIVE, atol=0)
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in actual.weights.items():
        difference = torch.linalg.vector_norm(weight - expected.weights[name])
        assert difference <= RELATIVE * torch.linalg.vector_norm(expected.weights[name]), name


def launch(run: Run, address: str, tier: str, schedules: Sequence[str], directory: Path) -> list[Result]:
    """Train on two ranks once under each schedule, and return the results of rank 0."""
    plan, result = directory / "plan.json", directory / "results.pt"
    plan.write_text(json.dumps([asdict(run), address, tier, list(schedules)]))
    run_ranks("tests.device.training", 2, plan, result)
    return [Result(**content) for content in torch.load(result)]


def main() -> None:
    plan, result = map(Path, sys.argv[1:])
    content, address, tier, schedules = json.loads(plan.read_text())
    lag.load()
    dist.init_process_group("cpu:gloo,lag:lag")
    results = [
        train_on_device(Run(**content), address, f"ranks-{tier}-{index}", tier, lag.SCHEDULES[name])
        for index, name in enumerate(schedules)
    ]
    if dist.get_rank() == 0:
        torch.save([asdict(trained) for trained in results], result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
