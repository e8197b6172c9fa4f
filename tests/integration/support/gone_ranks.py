"""One of two ranks, of which one is stopped in the end.

Run as `python -m tests.integration.support.gone_ranks ADDRESS REPORTS STOPPED`, with torchrun's environment variables.
STOPPED is the number of the rank that is stopped. Each rank writes the result of each scene to REPORTS/SCENE-RANK.json,
except for the stopped one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import trainer_client
from tests.integration.support.failing import failing_tower, inputs

TIMEOUT_SECONDS = 120.0


class Traffic(TorchDispatchMode):
    """A context that notes each collective of torch.distributed on this thread.

    Attributes:
        seen: for each collective its group, its name, and the dtypes and sizes of its tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
            tensors = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.seen.append(
                {
                    "group": group.group_name,
                    "what": str(func),
                    "tensors": [[str(tensor.dtype), tensor.numel()] for tensor in tensors],
                }
            )
        return func(*args, **kwargs or {})


def start(address: str, job: str, **config: Any) -> trainer_client.Engine:
    offload = {"device": "cpu"}
    return trainer_client.initialize(
        model=failing_tower(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
            "paramserver": {
                "address": address,
                "job": job,
                "gather": "collective",
                "collective_timeout_seconds": TIMEOUT_SECONDS,
            },
        }
        | config,
    )[0]


def train(engine: trainer_client.Engine, rank: int) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(inputs(engine.global_steps, rank)))
        engine.step()


def traffic(address: str, rank: int) -> Any:
    """Train two steps of two micro-batches each, read what is read by gathers, and note all collectives on the way."""
    with Traffic() as traffic, start(address, "traffic", gradient_accumulation_steps=2) as engine:
        for _ in range(2):
            train(engine, rank)
        elements = sum(weight.numel() for weight in engine.full_state_dict().values())
    return {"seen": traffic.seen, "elements": elements}


def stopped(address: str, rank: int, which: int) -> Any:
    """Stop one rank in the middle of a step, and return what becomes of the other one."""
    engine = start(address, f"stopped-{which}")
    train(engine, rank)
    # The rank that is stopped has voted, so the other one need not wait for that at its end.
    engine.wait_for_commit()
    if rank == which:
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()
    try:
        train(engine, rank)
    except trainer_client.CollectiveError as error:
        found = {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    begun = time.monotonic()
    engine.close_without_commit()
    return found | {"closing_seconds": time.monotonic() - begun}


def main() -> None:
    address, reports, which = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if not (reports / f"traffic-{rank}.json").exists():
        (reports / f"traffic-{rank}.json").write_text(json.dumps(traffic(address, rank)))
    (reports / f"stopped-{rank}.json").write_text(json.dumps(stopped(address, rank, which)))


if __name__ == "__main__":
    main()
