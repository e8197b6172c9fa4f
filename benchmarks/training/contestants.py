"""One contestant of a training benchmark: a process that makes steps when it is told to, and says how long they took.

Run as `python -m benchmarks.training.contestants SPEC` (JSON, see `Spec`). Each line on stdin is a number of steps to
make; the answer is a line of JSON. The first line comes when the model is ready. Ends with its stdin.

Runs in DeepSpeed's environment, too: only what a contestant needs is imported.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TextIO

import torch
from torch import nn

from benchmarks.training import bf16_emulation
from benchmarks.training.models import batches, build
from benchmarks.training.task import LEARNING_RATE, WEIGHT_DECAY, TrainingTask

ContestantKind = Literal["plain", "compute", "ours", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the process is to be.

    Attributes:
        kind: plain PyTorch; its forward and backward alone; this project; DeepSpeed.
        config: of the latter two.
        deferred: ours: the model is built under `zero.Init`, never whole in memory; its values are others then.
        each_step: the facts are asked for after each step, which may take time; else after each block.
    """

    kind: ContestantKind
    task: TrainingTask
    config: Mapping[str, Any]
    deferred: bool = False
    each_step: bool = False

    @classmethod
    def from_json(cls, text: str) -> Spec:
        values = json.loads(text)
        return cls(**values | {"task": TrainingTask(**values["task"])})


class Contestant(Protocol):
    """Makes steps."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss, 0-D."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def update(self) -> None:
        """Ends the step; what is left of it may go on in the background."""

    def settle(self) -> None:
        """Returns when nothing goes on in the background."""

    def facts(self) -> dict[str, Any]:
        """What is worth a note in the result: known when steps were made."""

    def close(self) -> None: ...


class Compute:
    """Forward and backward in bf16 and nothing else: no training is faster than that. The values are never updated."""

    def __init__(self, task: TrainingTask, model: nn.Module) -> None:
        self.model = model.to(torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.model.zero_grad()

    def settle(self) -> None:
        """Nothing goes on in the background."""

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """The process holds nothing else."""


class Plain(Compute):
    """PyTorch with everything in memory: parameters in bf16, fp32 master weights and moments, the fused AdamW."""

    def __init__(self, task: TrainingTask, model: nn.Module) -> None:
        masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        super().__init__(task, model)
        self._pairs = list(zip(self.model.parameters(), masters, strict=True))
        self._clip = task.clip
        self._optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    @torch.no_grad()
    def update(self) -> None:
        for parameter, master in self._pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        if self._clip:
            nn.utils.clip_grad_norm_([master for _, master in self._pairs], self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for parameter, master in self._pairs:
            parameter.copy_(master)


class WithEngine:
    """Drives an engine with DeepSpeed's verbs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def update(self) -> None:
        self._engine.step()


class Ours(WithEngine):
    """This project."""

    def __init__(self, spec: Spec) -> None:
        import trainer_client  # noqa: PLC0415 - not in every contestant's environment
        from trainer_client import zero  # noqa: PLC0415

        with zero.Init() if spec.deferred else nullcontext():
            model = build(spec.task)
        engine, *_ = trainer_client.initialize(model=model, config=spec.config)
        super().__init__(engine)

    def settle(self) -> None:
        self._engine.wait_for_commit()

    def facts(self) -> dict[str, Any]:
        report = self._engine.step_report()
        return {"placement": self._engine.placement(), "report": report and report.to_dict()}

    def close(self) -> None:
        self._engine.close()


class DeepSpeed(WithEngine):
    """DeepSpeed on the CPU, as one rank."""

    def __init__(self, spec: Spec) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(rendezvous | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
        import deepspeed  # type: ignore[import-not-found]  # noqa: PLC0415 - not in every contestant's environment

        model = build(spec.task)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(spec.config))
        super().__init__(engine)

    def settle(self) -> None:
        """`step` waits for everything itself."""

    def facts(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        return {"optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__}

    def close(self) -> None:
        self._engine.destroy()
        torch.distributed.destroy_process_group()


def begin(spec: Spec) -> Contestant:
    """Makes the contestant, ready for its first step."""
    match spec.kind:
        case "plain":
            return Plain(spec.task, build(spec.task))
        case "compute":
            # Built in bf16: in fp32, what has to be trained elsewhere might not fit.
            torch.set_default_dtype(torch.bfloat16)
            return Compute(spec.task, build(spec.task))
        case "ours":
            return Ours(spec)
        case "deepspeed":
            return DeepSpeed(spec)


def make_steps(
    contestant: Contestant, count: int, draw: Callable[[], torch.Tensor], *, each_step: bool
) -> dict[str, list[Any]]:
    """Seconds of each step, of its three calls, its loss, and the facts: of each step, or of the last.

    A step lasts until the next one can begin: to read the loss belongs to it, what goes on behind it to the next.
    """
    taken: dict[str, list[Any]] = {name: [] for name in ("seconds", "forward", "backward", "update", "losses", "facts")}
    for number in range(count):
        marks = [time.perf_counter()]
        loss = contestant.forward(draw())
        marks.append(time.perf_counter())
        contestant.backward(loss)
        marks.append(time.perf_counter())
        taken["losses"].append(loss.item())
        contestant.update()
        marks.append(time.perf_counter())
        taken["seconds"].append(marks[-1] - marks[0])
        for name, begun, ended in zip(("forward", "backward", "update"), marks, marks[1:], strict=False):
            taken[name].append(ended - begun)
        if each_step or number == count - 1:
            taken["facts"].append(contestant.facts())
    return taken


def serve(spec: Spec, answers: TextIO) -> None:
    """Makes steps as stdin demands."""

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    contestant = begin(spec)
    data = batches(spec.task)
    answer({"ready": True})
    for line in sys.stdin:
        taken: dict[str, Any] = make_steps(contestant, int(line), lambda: next(data), each_step=spec.each_step)
        begun = time.perf_counter()
        contestant.settle()
        answer(taken | {"settle_seconds": time.perf_counter() - begun})
    contestant.close()


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with bf16_emulation.in_fp32() if bf16_emulation.need_fp32() else nullcontext():
        serve(Spec.from_json(sys.argv[1]), answers)


if __name__ == "__main__":
    main()
