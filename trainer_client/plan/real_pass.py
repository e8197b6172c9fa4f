"""A real forward and backward of the planned model, in the dtype and on the micro-batch of the job.

The pass has what single operations do not show: torch's Python code, the waking of threads before each operation that
runs on several, and memory that the allocator takes from the kernel and gives back. So it is timed in place of the
operations wherever the machine has room and time for it. This module must never run an optimizer or a store.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from trainer_client.plan.model import build, find_builder
from trainer_client.plan.model_inputs import make_batch
from trainer_client.plan.rehearsal import Rehearsal, autocast, loss_of
from trainer_client.step.precision import cast_floating_inputs

# A pass is real if it takes at most this part of the host memory of a rank, and at most so many floating-point
# operations: seconds on two processors, on which four passes still take less than a minute.
_MEMORY_FRACTION = 0.25
_MOST_FLOPS = 5e11
# The first passes make what later ones use again: threads, and the heap of the process.
_FIRST_PASSES, _PASSES = 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPass:
    """The pass that a process of the probe runs.

    Attributes:
        source: the model, as the command line has it.
        inputs: the option `--inputs`.
        samples, tokens: the micro-batch.
        dtype: the dtype of parameters and floating-point inputs; None: the model's own.
        autocast_dtype: the dtype of `torch.autocast` around the forward; None: there is none.
    """

    source: str
    inputs: str | None
    samples: int
    tokens: int
    dtype: torch.dtype | None
    autocast_dtype: torch.dtype | None = None


def can_be_real(rehearsal: Rehearsal, parameter_bytes: int, host_bytes: int, ranks: int) -> bool:
    """Return whether the machine has room and time for real passes on all ranks of a node.

    Args:
        parameter_bytes: the bytes of all parameters in the dtype of the pass.
        host_bytes: the bytes of the node's host memory.
    """
    room = host_bytes / ranks * _MEMORY_FRACTION
    return parameter_bytes + rehearsal.peak_bytes_without_gradients() <= room and rehearsal.flops <= _MOST_FLOPS


def pass_seconds(wanted: RealPass) -> float:
    """Return the median seconds of a forward and backward in this process."""
    builder = find_builder(wanted.source)
    model = build(builder, nullcontext())
    batch = make_batch(model, wanted.inputs)(wanted.samples, wanted.tokens)
    return time_passes(model, batch, wanted.dtype, wanted.autocast_dtype)


def time_passes(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    autocast_dtype: torch.dtype | None = None,
) -> float:
    """Return the median seconds of a forward and backward of a model with memory."""
    if dtype is not None:
        # The engine gives no buffer another dtype, and Module.to would also convert complex ones.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        batch = cast_floating_inputs(dict(batch), dtype)
    model.train()
    # The engine takes each gradient as soon as it is there.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)

    def run() -> None:
        with autocast(autocast_dtype):
            output = model(**batch)
        loss_of(output).backward()

    taken = [_timed(run) for _ in range(_FIRST_PASSES + _PASSES)]
    return statistics.median(taken[_FIRST_PASSES:])


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
