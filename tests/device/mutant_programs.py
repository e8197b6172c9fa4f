"""The programs by which `make mutants` finds what was left out; see mutant_run.py, which runs them.

A program uses the copies beside computation in one way, on a device that is late, and returns all bits that came out.
What else it does wrong, the device and the guarded arena report. Most programs are training runs. Their contexts have
the loop do what few loops do, at the moment at which copies are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.device import lag, lanes_cases
from tests.device.lanes_cases import DEVICE, NUMEL
from tests.device.matrix_rank import digest
from tests.device.tight_boundaries import tight_store, train_tower
from tests.device.training_on_lanes import Lateness, train
from tests.integration.support import training
from tests.integration.support.daemon import Daemon
from tests.integration.support.matrix_cells import run_of
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import Run
from trainer_client.base.lanes.device_lanes import DeviceLanes
from trainer_client.engine.engine import Engine
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.units import Unit
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step import gradients
from trainer_client.training.step.gradients import Gradients

# The schedules of programs. They matter for mutants that change bits, and where the host finds a copy done by chance:
# the device sees other races without any lag.
LATE = {
    "all late": Lateness(all_ms=20),
    "compute late": Lateness(compute_ms=300),
    # A wait of the host ends a lag, so that a long one costs little time.
    "copies very late": Lateness(lane_ms={"in": 1000, "out": 1000}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program.

    Attributes:
        run: makes it, with a schedule, the address of a store and the name of a job of its own; returns its bits.
        schedules: the names of those of LATE under which it runs.
        most_seconds: if it runs for longer, it hangs. On a busy machine a training run takes some 10 s.
    """

    run: Callable[[Lateness, str, str], str]
    schedules: Sequence[str]
    most_seconds: float = 60.0


def _use_lanes(late: Lateness, _: str, __: str) -> str:
    """Use lanes as a step of two ranks does, without a store; see lanes_cases.py."""
    lag.reset()
    lag.Schedule(all_ms=late.all_ms, compute_ms=late.compute_ms).use()
    results = lanes_cases.run()
    if results != lanes_cases.expected():
        return f"{results}"
    lanes_cases.run_ends()
    lag.set_lag(0)
    return f"{lanes_cases.measure_early()} early, {lanes_cases.measure_beside()} beside"


def _use_collectives(late: Lateness, _: str, __: str) -> str:
    """Reduce and gather tensors that are freed as soon as the call has returned, also the result."""
    lag.reset()
    lag.Schedule(all_ms=late.all_ms, compute_ms=late.compute_ms).use()
    collectives = Collectives(DEVICE)
    results: list[float] = []

    def full(value: float, parts: int = 1) -> torch.Tensor:
        return torch.full((parts * NUMEL,), value, device=DEVICE)

    for number in range(3):
        partition, whole = full(torch.nan), full(torch.nan, 2)
        collectives.reduce_scatter(partition, full(number + 1.0, 2))
        # This result is dropped. The memory of each tensor goes to the next one of its size.
        collectives.reduce_scatter(full(torch.nan), full(7.0, 2))
        others = [full(-1.0, parts) for parts in (1, 2, 1, 2)]
        collectives.lanes.rejoin()
        collectives.all_gather_flat(whole, partition * 2)
        collectives.all_gather_flat(full(0.0, 2), full(5.0))
        shown = whole + 1
        collectives.broadcast(shown)
        collectives.broadcast(full(9.0))
        others += [full(-2.0, parts) for parts in (1, 2, 1, 2)]
        results += [float(tensor.mean()) for tensor in (partition, whole, shown, *others)]
    collectives.close()
    return f"{results}"


def _train(
    make: Callable[[str, str], Run],
    *contexts: Callable[[], AbstractContextManager[Any]],
    schedules: Sequence[str] = ("all late", "compute late"),
    counts_traffic: bool = False,
) -> Program:
    """Return a program that trains, within the contexts.

    Args:
        make: makes the run, with the address of the store and the name of the job.
        contexts: each changes the loop, or a bound of the trainer.
        schedules: see Program.
        counts_traffic: whether the result has the number of bytes that were copied in either direction.
    """

    def run(late: Lateness, address: str, job: str) -> str:
        results: list[str] = []
        with ExitStack() as changes:
            for context in contexts:
                changes.enter_context(context())
            meanwhile = partial(_traffic_counted, results) if counts_traffic else nullcontext
            results.append(digest(train(make(address, job), late, meanwhile)))
        return " ".join(results) or "the training failed"

    return Program(run=run, schedules=schedules)


def _park_gradients(
    *contexts: Callable[[], AbstractContextManager[Any]], schedules: Sequence[str], **fields: Any
) -> Program:
    """Return a program that trains on a store of its own, which has the ranks park gradients."""

    def run(late: Lateness, _: str, job: str) -> str:
        with ExitStack() as entered:
            address = entered.enter_context(_store_that_asks_to_park())
            for context in contexts:
                entered.enter_context(context())
            return digest(train(Run(layers=12, steps=1, config=config_of(address, job, "nvme"), **fields), late))

    return Program(run=run, schedules=schedules)


@contextmanager
def _store_that_asks_to_park() -> Iterator[str]:
    """Run a store whose host memory is smaller than the gradients of 12 layers, for all ranks; its address."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with ExitStack() as started:
        address = [""]
        if is_first:
            directory = started.enter_context(TemporaryDirectory())
            budgets = {"host_budget": 3584 << 10, "nvme_budget": "1GiB"}
            address = [started.enter_context(Daemon(Path(directory) / "state", budgets)).address]
        if dist.is_initialized():
            dist.broadcast_object_list(address)
        yield address[0]
        if dist.is_initialized():
            dist.barrier()


def _no_room_for_sums() -> Any:
    return mock.patch.object(gradients, "_SHARE_FOR_SUMS", 0.0)


@contextmanager
def forward_without_memory(fails_at: int) -> Iterator[None]:
    """Let one allocation of a unit fail, by its number from 1, and the loop repeat its forward."""
    allocate, forward, numbers = FlatGroup.allocate, Engine.forward, count(1)

    def allocate_or_fail(group: FlatGroup) -> None:
        if next(numbers) == fails_at:
            raise torch.OutOfMemoryError("there is no memory on this device")
        allocate(group)

    def forward_again(engine: Engine, *arguments: Any, **named: Any) -> Any:
        try:
            return forward(engine, *arguments, **named)
        except torch.OutOfMemoryError:
            return forward(engine, *arguments, **named)

    with (
        mock.patch.object(FlatGroup, "allocate", allocate_or_fail),
        mock.patch.object(Engine, "forward", forward_again),
    ):
        yield
    assert next(numbers) > fails_at + 1, "no allocation has failed, or the loop has ended with it"


@contextmanager
def _states_leaving() -> Iterator[None]:
    """Have all states leave the device for a moment after each micro-batch, with gradients that are being summed."""
    step = Engine.step

    def step_and_leave(engine: Engine) -> None:
        step(engine)
        engine.offload_states()
        engine.reload_states()

    with mock.patch.object(Engine, "step", step_and_leave):
        yield


@contextmanager
def gradients_changed() -> Iterator[None]:
    """Have the loop change states and all gradients after each backward pass, while copies are under way.

    It reads the gradient first that leaves the device first, so the others are still on their way.
    """
    step = Engine.step

    def change_and_step(engine: Engine) -> None:
        names = [name for name, _ in engine.module.named_parameters()]
        first = next(name for name in reversed(names) if ".h." in name)
        halves = {first: _some(engine.get_local(first, "grad")) * 0.5}
        engine.set_local(names[0], "exp_avg", torch.zeros_like(_some(engine.get_local(names[0], "exp_avg"))))
        for name in names:
            half = halves[name] if name in halves else _some(engine.get_local(name, "grad")) * 0.5
            engine.set_local(name, "grad", half)
        step(engine)

    with mock.patch.object(Engine, "step", change_and_step):
        yield


def _some(values: torch.Tensor | None) -> torch.Tensor:
    assert values is not None, "each parameter has a gradient"
    return values


@contextmanager
def _gradients_dropped() -> Iterator[None]:
    """Have the loop drop gradients before each forward: while they leave the device, come back to it, or stay there."""
    forward = Engine.forward

    def drop_and_forward(engine: Engine, *arguments: Any, **named: Any) -> Any:
        for passes_are_last in ((True,), (True, False), (False, False)):
            for is_last in passes_are_last:
                engine.set_gradient_accumulation_boundary(is_last)
                engine.backward(forward(engine, *arguments, **named).loss)
            engine.zero_grad()
        engine.set_gradient_accumulation_boundary(None)
        return forward(engine, *arguments, **named)

    with mock.patch.object(Engine, "forward", drop_and_forward):
        yield


@contextmanager
def _passes_added() -> Iterator[None]:
    """Have each step consist of two backward passes, each of which could be its last."""
    forward = Engine.forward

    def pass_and_forward(engine: Engine, *arguments: Any, **named: Any) -> Any:
        engine.backward(forward(engine, *arguments, **named).loss)
        return forward(engine, *arguments, **named)

    with mock.patch.object(Engine, "forward", pass_and_forward):
        yield


@contextmanager
def _backward_fails() -> Iterator[None]:
    """Let a backward pass fail in its last unit, when the gradients of the others are on their way."""
    start = Gradients.start_backward

    def start_or_fail(gradients: Gradients, unit: Unit, step: int) -> None:
        if unit.index == 1:
            raise ArithmeticError("a gradient cannot be computed")
        start(gradients, unit, step)

    with suppress(ArithmeticError), mock.patch.object(Gradients, "start_backward", start_or_fail):
        yield


@contextmanager
def _traffic_counted(results: list[str]) -> Iterator[None]:
    """Add to the list how many bytes were copied to the host and to the device."""
    with lag.recorded() as spans:
        yield
    for engine in (lag.Engine.TO_HOST, lag.Engine.TO_DEVICE):
        results.append(f"{sum(span.nbytes for span in spans if span.engine is engine):.0f}")


@contextmanager
def _small_root() -> Iterator[None]:
    """Let the root have one trainable element, so that the last gradient of a step has no shard on the second rank.

    That rank needs no norm of it, for which it would wait.
    """
    build = training.build_model

    def build_with_scale(run: Run) -> nn.Module:
        model = build(run)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".h." in name)
        model.register_parameter("scale", nn.Parameter(torch.ones(())))

        def multiply(_: nn.Module, __: Any, output: Any) -> None:
            output.loss = output.loss * model.scale

        model.register_forward_hook(multiply)
        return model

    with mock.patch.object(training, "build_model", build_with_scale):
        yield


@contextmanager
def _polls_in_between() -> Iterator[None]:
    """Let each poll come when the device has just done the oldest collective whose tensors are kept, and no more."""
    poll = DeviceLanes.poll

    def wait_and_poll(lanes: DeviceLanes) -> None:
        if lanes._used_by_comm:
            lanes._used_by_comm[0][0].synchronize()
        poll(lanes)

    with mock.patch.object(DeviceLanes, "poll", wait_and_poll):
        yield


def _on(tier: str, **fields: Any) -> Callable[[str, str], Run]:
    return lambda address, job: Run(config=config_of(address, job, tier), **{"steps": 2, **fields})


def _reducing_in_fp32(address: str, job: str) -> Run:
    run = _on("nvme", precision="bf16", accumulation=2)(address, job)
    return replace(run, config=run.config | {"communication_data_type": "fp32"})


def _moving_boundaries(address: str, job: str) -> Run:
    section = {"activations": {"offload": True, "smallest": 1024}}
    config = config_of(address, job, "nvme", **section)
    return Run(layers=6, steps=2, checkpointing="non-reentrant", config=config)


def _at(training: str, place: str, world_size: int) -> Callable[[str, str], Run]:
    return lambda address, job: run_of(training, place, world_size, address, job)


def _boundaries_one_at_a_time(late: Lateness, _: str, job: str) -> str:
    """Take boundaries back from a store of its own, which has room for one."""
    with TemporaryDirectory() as directory, tight_store(Path(directory)) as daemon, late.used():
        weights = train_tower(daemon.address, job, offload=True)
    return f"{[float(value.double().sum()) for value in weights.values()]}"


_VERY_LATE = ("copies very late",)

# The programs of one rank and of two, those that find most first.
ALONE: Mapping[str, Program] = {
    "lanes": Program(run=_use_lanes, schedules=("all late", "compute late"), most_seconds=20.0),
    "nvme": _train(_on("nvme")),
    "sums leave the device": _train(_on("cpu", accumulation=3, clipping=0.5), _no_room_for_sums, counts_traffic=True),
    "gradients are changed": _train(_on("nvme", accumulation=2), gradients_changed, schedules=_VERY_LATE),
    "gradients are dropped": _train(_on("nvme"), _gradients_dropped, schedules=_VERY_LATE),
    "passes are added": _train(_on("nvme"), _passes_added, schedules=_VERY_LATE),
    "a backward fails": _train(_on("nvme"), _backward_fails, schedules=_VERY_LATE),
    # Sums that come back to the device give up their lease.
    "gradients are parked": _park_gradients(_gradients_dropped, schedules=_VERY_LATE),
    "boundaries": _train(_moving_boundaries, schedules=("all late", "compute late", *_VERY_LATE)),
    "boundaries, one at a time": Program(run=_boundaries_one_at_a_time, schedules=_VERY_LATE),
    "bf16, poisoned step": _train(_on("nvme", steps=3, precision="bf16", poisoned_step=1)),
    "gradients on the device": _train(_at("fp32", "zero-1 + optimizer nvme", 1)),
    "fractions": _train(_at("fp32, each micro-batch", "zero-3 + fractions", 1)),
    "a forward without memory": _train(_on("nvme"), partial(forward_without_memory, 3)),
    "parameters in the store": _train(_at("fp32", "zero-3 + parameters nvme", 1), schedules=_VERY_LATE),
    "states on the device": _train(_at("fp32, each micro-batch", "zero-2", 1)),
}
TOGETHER: Mapping[str, Program] = {
    "collectives": Program(run=_use_collectives, schedules=("all late",)),
    "nvme": _train(_on("nvme", clipping=0.5)),
    "host, accumulation": _train(_on("cpu", accumulation=2)),
    "gradients are changed": _train(_on("nvme", accumulation=2), gradients_changed, schedules=_VERY_LATE),
    "gradients are dropped": _train(_on("nvme"), _gradients_dropped, schedules=_VERY_LATE),
    "a small root": _train(_on("nvme"), _small_root, schedules=_VERY_LATE),
    "a small root is parked": _park_gradients(_small_root, schedules=_VERY_LATE, clipping=0.5),
    "reductions in fp32": _train(_reducing_in_fp32, schedules=("all late",)),
    "polls in between": _train(
        _at("fp32, each micro-batch", "zero-2 + optimizer host", 2), _polls_in_between, schedules=("compute late",)
    ),
    "replicated states": _train(_at("fp32, each micro-batch", "zero-1 + optimizer nvme", 2)),
    "fractions": _train(_at("bf16", "zero-3 + fractions", 2)),
    "states on the device": _train(_at("fp32, each micro-batch", "ddp", 2)),
    "states leave the device": _train(_at("fp32, each micro-batch", "zero-1 + optimizer nvme", 2), _states_leaving),
    "sums leave the device": _train(_on("cpu", accumulation=3, clipping=0.5), _no_room_for_sums),
}
