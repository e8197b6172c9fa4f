"""A runner of scripts as they stand, which records their losses: `recording.py LOSSES SCRIPT ARGUMENTS...`.

On rank 0 it appends a line to LOSSES for each loss that the script takes backward, by whichever call it does so:
`accelerator.backward`, `engine.backward` or `loss.backward`. Where one of them calls another, the outer one counts.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


class Losses:
    """The file of the losses, and the calls by which a loss comes into it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._depth = 0

    def watch(self, owner: Any, position: int) -> None:
        """Record the argument at `position` of each call of `owner.backward`."""
        original = owner.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and os.environ.get("RANK", "0") == "0":
                with self._path.open("a") as file:
                    file.write(f"{args[position].item()!r}\n")
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        owner.backward = backward


def step_after_each_backward(clipped_to: float) -> None:
    """Have Accelerate step without DeepSpeed where it steps with it: within `backward`, and not in the script's `step`.

    With DeepSpeed, Accelerate steps after each backward outside of `accumulate`, also where the script itself calls
    `step` only after some of them.
    """
    import accelerate  # noqa: PLC0415 - the script decides whether it is used
    from accelerate.optimizer import AcceleratedOptimizer  # noqa: PLC0415

    backward, step = accelerate.Accelerator.backward, AcceleratedOptimizer.step

    def backward_and_step(self: accelerate.Accelerator, loss: torch.Tensor, **kwargs: Any) -> None:
        backward(self, loss, **kwargs)
        for optimizer in self._optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, clipped_to)
            step(optimizer)
            optimizer.zero_grad()

    accelerate.Accelerator.backward = backward_and_step
    AcceleratedOptimizer.step = lambda *_: None


def have_dummies() -> None:
    """Give Accelerate the names of its placeholders, which it has only where DeepSpeed is installed."""
    import accelerate.utils  # noqa: PLC0415 - the script decides whether it is used
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler  # noqa: PLC0415

    accelerate.utils.DummyOptim, accelerate.utils.DummyScheduler = DummyOptim, DummyScheduler


def main() -> None:
    words = sys.argv[1:]
    # A launcher puts the number of the rank before the other arguments.
    of_launcher = words[:1] if words[0].startswith("--local_rank") else []
    file, script, *arguments = words[len(of_launcher) :]
    losses = Losses(Path(file))
    sys.argv = [script, *of_launcher, *arguments]
    if clipped_to := os.environ.get("STEP_AFTER_EACH_BACKWARD_CLIPPED_TO"):
        step_after_each_backward(float(clipped_to))
    if os.environ.get("HAS_DUMMIES"):
        have_dummies()
    losses.watch(torch.Tensor, 0)
    if find_spec("deepspeed") is not None:
        import deepspeed  # noqa: PLC0415 - it is there only where the script runs over it

        losses.watch(deepspeed.DeepSpeedEngine, 1)
    if find_spec("accelerate") is not None:
        import accelerate  # noqa: PLC0415 - the script decides whether it is used

        losses.watch(accelerate.Accelerator, 1)
    # Some scripts draw their weights without a seed.
    torch.manual_seed(0)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
