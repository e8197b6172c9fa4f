"""One of two ranks, of which rank 0 fails.

Run as `python -m tests.integration.support.failing_ranks ADDRESS REPORTS`, with torchrun's environment variables. Each
rank writes the result of each scene to REPORTS/RANK.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer_client
from tests.integration.support.daemon import tiers
from tests.integration.support.failing import Failing, failing_tower, inputs
from tests.integration.support.waiting import wait_until
from trainer_client.errors import CollectiveError, TrainerClientError

STEPS = 3
TIMEOUT_SECONDS = 60.0


def start(address: str, job: str, gather: str) -> trainer_client.Engine:
    offload = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "paramserver": {
            "address": address,
            "job": job,
            "gather": gather,
            "collective_timeout_seconds": TIMEOUT_SECONDS,
        },
    }
    return trainer_client.initialize(model=failing_tower(), config=config)[0]


def train(engine: trainer_client.Engine, rank: int) -> None:
    engine.backward(engine(inputs(engine.global_steps, rank)))
    engine.step()


def weights_of(engine: trainer_client.Engine) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in engine.full_state_dict().items()}


def undisturbed(address: str, rank: int) -> Any:
    with start(address, "undisturbed", "collective") as engine:
        for _ in range(STEPS):
            train(engine, rank)
        return weights_of(engine)


def forwards_that_fail_alone(address: str, rank: int) -> Any:
    """Fail forwards on rank 0 only. Gathers read from the one store, so rank 1 is not affected."""
    with start(address, "alone", "store") as engine:
        for step in range(STEPS):
            for call in range(1, 40, 3) if rank == 0 else ():
                try:
                    with Failing(call):
                        engine(inputs(step, rank))
                except torch.OutOfMemoryError:
                    continue
            train(engine, rank)
        return weights_of(engine)


def forwards_that_fail_alike(address: str, rank: int) -> Any:
    """Fail the same forwards on all ranks, because gathers are collectives here."""
    with start(address, "alike", "collective") as engine:
        for step in range(STEPS):
            for block in engine.module.blocks:
                block.fails = ArithmeticError
                try:
                    engine(inputs(step, rank))
                except ArithmeticError:
                    continue
            train(engine, rank)
        return weights_of(engine)


def failure_of(act: Callable[[], Any]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        act()
    except (TrainerClientError, torch.OutOfMemoryError) as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    return {"kind": "none", "text": "", "seconds": time.monotonic() - begun}


def fail_in_gather(engine: trainer_client.Engine, rank: int) -> None:
    batch = inputs(1, rank)
    with Failing(3 if rank == 0 else None):
        engine(batch)


def fail_in_backward(engine: trainer_client.Engine, rank: int) -> None:
    loss = engine(inputs(1, rank))
    with Failing(30 if rank == 0 else None):
        engine.backward(loss)


def fail_in_step(engine: trainer_client.Engine, rank: int) -> None:
    engine.backward(engine(inputs(1, rank)))
    with Failing(4 if rank == 0 else None):
        engine.step()


def fail_in_change(engine: trainer_client.Engine, rank: int) -> None:
    value = torch.ones(32, 32)
    with Failing(4 if rank == 0 else None):
        engine.set_full("first.weight", "param", value)


def failing_together(address: str, rank: int) -> Any:
    """Fail rank 0 in collectives of several phases, then continue each job; return the errors and the final weights."""
    reports = {}
    for fail in (fail_in_gather, fail_in_backward, fail_in_step, fail_in_change):
        engine = start(address, f"together-{fail.__name__}", "collective")
        train(engine, rank)
        report = failure_of(lambda fail=fail, engine=engine: fail(engine, rank))  # type: ignore[misc]
        dist.barrier()
        wait_until(lambda: tiers(address)[0].leased_bytes == 0)
        dist.barrier()
        report["afterwards"] = failure_of(lambda engine=engine: train(engine, rank))  # type: ignore[misc]
        try:
            engine.close_without_commit()
        except CollectiveError as error:
            report["close"] = str(error)
        dist.barrier()
        with start(address, f"together-{fail.__name__}", "collective") as engine:
            while engine.global_steps < STEPS:
                train(engine, rank)
            report["weights"] = weights_of(engine)
        reports[fail.__name__] = report
    return reports


SCENES = [undisturbed, forwards_that_fail_alone, forwards_that_fail_alike, failing_together]


def main() -> None:
    address, reports = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {scene.__name__: scene(address, rank) for scene in SCENES}
    (reports / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
