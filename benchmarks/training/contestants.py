"""One contestant of a training benchmark: a process that makes steps on demand, and reports how long they took.

Run it as `python -m benchmarks.training.contestants SPEC` (JSON, see `Spec`). It prints a line when the model is ready.
Then each line on stdin is a number of steps to make, which it answers with a line of JSON. It ends when stdin does.

It also runs in DeepSpeed's environment, so it must import only what its contestant needs.
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
from typing import Any, Literal, Protocol, TextIO, cast

import torch
from torch import nn

from benchmarks.training import bf16_emulation
from benchmarks.training.models import batches, build
from benchmarks.training.task import LEARNING_RATE, WEIGHT_DECAY, TrainingTask

ContestantKind = Literal["plain", "compute", "ours", "deepspeed", "fsdp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The description of a contestant, which its process gets as JSON.

    Attributes:
        kind: "plain" (PyTorch in memory), "compute" (forward and backward alone), "ours" (this project), "deepspeed",
            "fsdp" (torch's FSDP2 with CPU offload).
        config: the config of "ours" and "deepspeed".
        device: the kind of device that computes, as "cpu" and "cuda".
        deferred: for "ours" and "deepspeed": build the model under `zero.Init`, so that it is never whole in memory.
            The initial values differ from those of the other contestants then.
    """

    kind: ContestantKind
    task: TrainingTask
    config: Mapping[str, Any]
    device: str = "cpu"
    deferred: bool = False

    @classmethod
    def from_json(cls, text: str) -> Spec:
        values = json.loads(text)
        return cls(**values | {"task": TrainingTask(**values["task"])})


class Contestant(Protocol):
    """A model and its optimizer, which make one step by `forward`, `backward` and `update`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss (0-D) of token ids [batch, tokens]."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def end_micro_batch(self) -> None:
        """End a micro-batch that is not the last one of its step."""

    def update(self) -> None:
        """End the step; a part of its work may go on in the background."""

    def settle(self) -> None:
        """Wait until no work goes on in the background."""

    def facts(self) -> dict[str, Any]:
        """Return what the result should tell about this contestant, for example its placement."""

    def close(self) -> None: ...


class Compute:
    """Forward and backward in bf16 without updates, a lower bound for the time of every training."""

    def __init__(self, task: TrainingTask, model: nn.Module) -> None:
        self.model = model.to(torch.bfloat16)
        self._accumulation = task.accumulation

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulation).backward()

    def end_micro_batch(self) -> None:
        """Do nothing, because torch adds up the gradients."""

    def update(self) -> None:
        self.model.zero_grad()

    def settle(self) -> None:
        """Return at once, because no work goes on in the background."""

    def facts(self) -> dict[str, Any]:
        return device_memory()

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""


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
    """A contestant whose engine has DeepSpeed's methods: a call, `backward` and `step`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(tokens, labels=tokens).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def end_micro_batch(self) -> None:
        self._engine.step()

    def update(self) -> None:
        self._engine.step()


class Ours(WithEngine):
    """This project, with the placement that its config names."""

    def __init__(self, spec: Spec) -> None:
        import trainer_client  # noqa: PLC0415 - DeepSpeed's environment lacks its dependencies
        from trainer_client import zero  # noqa: PLC0415

        with zero.Init() if spec.deferred else torch.device(spec.device):
            model = build(spec.task)
        engine, *_ = trainer_client.initialize(model=model, config=spec.config)
        super().__init__(engine)

    def settle(self) -> None:
        self._engine.wait_for_commit()

    def facts(self) -> dict[str, Any]:
        # The single waits of a step are nine tenths of a report, and no table has any, so the results leave them out.
        report = self._engine.step_report()
        kept = report and {name: value for name, value in report.to_dict().items() if name != "stalls"}
        return {"placement": self._engine.placement(), "report": kept} | device_memory()

    def close(self) -> None:
        self._engine.close()


class FullySharded(Compute):
    """torch's FSDP2 as one rank: fp32 parameters and states in host memory, gathered in bf16 block by block."""

    def __init__(self, spec: Spec, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - only this contestant needs them
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

        become_the_only_rank()
        host = "" if spec.device == "cpu" else "cpu:gloo,"
        backend = torch.distributed.get_default_backend_for_device(spec.device)
        torch.distributed.init_process_group(f"{host}{spec.device}:{backend}")
        policies: dict[str, Any] = {
            "mesh": init_device_mesh(spec.device, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=spec.device != "cpu"),
        }
        for block in cast(Any, model).transformer.h:
            fully_shard(block, **policies)
        fully_shard(model, **policies)
        self.model = model
        self._accumulation = spec.task.accumulation
        self._clip = spec.task.clip
        parameters = self.model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def update(self) -> None:
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class DeepSpeed(WithEngine):
    """DeepSpeed as one rank."""

    def __init__(self, spec: Spec) -> None:
        become_the_only_rank()
        import deepspeed  # noqa: PLC0415 - only its own environment has it

        config = dict(spec.config)
        deferred = deepspeed.zero.Init(config_dict_or_path=config) if spec.deferred else nullcontext()
        with torch.device(spec.device), deferred:
            model = build(spec.task)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        super().__init__(engine)

    def settle(self) -> None:
        """Return at once, because DeepSpeed's `step` leaves no work in the background."""

    def facts(self) -> dict[str, Any]:
        import deepspeed  # noqa: PLC0415 - only its own environment has it

        optimizer = self._engine.optimizer
        name = type(getattr(optimizer, "optimizer", optimizer)).__name__
        return {"optimizer": name, "version": deepspeed.__version__} | device_memory()

    def close(self) -> None:
        self._engine.destroy()
        torch.distributed.destroy_process_group()


def become_the_only_rank() -> None:
    """Set the variables that torchrun would set for the rank of a launch with one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(rendezvous | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})


def device_memory() -> dict[str, Any]:
    """Return the most bytes of the accelerator's memory that were allocated so far; nothing without an accelerator."""
    if not torch.accelerator.is_available():
        return {}
    return {"device_peak_bytes": torch.accelerator.max_memory_allocated()}


def begin(spec: Spec) -> Contestant:
    """Return the contestant, ready for its first step."""
    match spec.kind:
        case "ours":
            return Ours(spec)
        case "deepspeed":
            return DeepSpeed(spec)
    if spec.kind == "compute":
        # The model is built in bf16, because the largest models of the scale benchmark may not fit in fp32.
        torch.set_default_dtype(torch.bfloat16)
    # All contestants draw their initial values on the device, which takes a second there and a minute on a CPU.
    with torch.device(spec.device):
        model = build(spec.task)
    match spec.kind:
        case "plain":
            return Plain(spec.task, model)
        case "compute":
            return Compute(spec.task, model)
        case "fsdp":
            return FullySharded(spec, model)


def make_steps(
    contestant: Contestant, count: int, draw: Callable[[], torch.Tensor], *, accumulation: int
) -> dict[str, list[float]]:
    """Make `count` steps with batches from `draw`, and return the times and losses of a `contestant_process.Block`.

    A step has `accumulation` micro-batches. The loss, and the times of forward and backward, are those of the last one.

    A step lasts until the next one can begin. So reading the loss counts for the step. Work that a step leaves in the
    background, or to an accelerator, counts for the next step, which it slows.
    """
    taken: dict[str, list[float]] = {name: [] for name in ("seconds", "forward", "backward", "update", "losses")}
    for _ in range(count):
        began = time.perf_counter()
        for _ in range(accumulation - 1):
            contestant.backward(contestant.forward(draw()))
            contestant.end_micro_batch()
        marks = [time.perf_counter()]
        loss = contestant.forward(draw())
        marks.append(time.perf_counter())
        contestant.backward(loss)
        marks.append(time.perf_counter())
        taken["losses"].append(loss.item())
        contestant.update()
        marks.append(time.perf_counter())
        taken["seconds"].append(marks[-1] - began)
        for name, begun, ended in zip(("forward", "backward", "update"), marks, marks[1:], strict=False):
            taken[name].append(ended - begun)
    return taken


def serve(spec: Spec, answers: TextIO) -> None:
    """Make as many steps as each line of stdin asks for, and write an answer to each, until stdin ends."""

    def answer(value: Mapping[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    contestant = begin(spec)
    data = batches(spec.task)
    answer({"ready": True})
    for line in sys.stdin:
        taken = make_steps(
            contestant, int(line), lambda: next(data).to(spec.device), accumulation=spec.task.accumulation
        )
        facts = contestant.facts()
        begun = time.perf_counter()
        contestant.settle()
        answer({**taken, "facts": facts, "settle_seconds": time.perf_counter() - begun})
    contestant.close()


def main() -> None:
    """Run the contestant that the first argument describes."""
    # Libraries print to stdout. It becomes stderr for them, so that their lines do not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with bf16_emulation.in_fp32() if bf16_emulation.need_fp32() else nullcontext():
        serve(Spec.from_json(sys.argv[1]), answers)


if __name__ == "__main__":
    main()
