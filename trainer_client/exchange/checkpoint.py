"""A checkpoint of another framework as an import sees it: tensors by name, and the other values that a run needs.

The readers of the formats make these records. This module must never hold the elements of a tensor, but must read them
when a caller asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paramserver.contract.optimizers.registry import OPTIMIZERS
from trainer_client.client.store_client.types import Kind, kind_from_proto

# The optimizer states that a store can keep, by the names that torch's optimizers give them.
STATE_KINDS: tuple[Kind, ...] = tuple(
    dict.fromkeys(kind_from_proto(kind) for optimizer in OPTIMIZERS.values() for kind in optimizer.states)
)


class Values(Protocol):
    """The elements of a parameter's weight, or of one of its optimizer states, in a file of the checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements in the file."""

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill `target` [n], on the CPU, with elements [offset, offset + n) of the flattened tensor.

        The elements are converted to the dtype of `target`.

        Raises:
            ImportCheckpointError: the file is damaged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """A parameter of the checkpoint, with its optimizer states.

    Attributes:
        name: the parameter's name in the model.
        shape: the parameter's shape.
        weight: the most precise values of the parameter that the checkpoint has.
        states: the parameter's optimizer states; empty for a frozen parameter and in a checkpoint without an optimizer.
        update_count: how often the optimizer has updated the parameter.
        trainable: whether the checkpoint's run trained the parameter.
    """

    name: str
    shape: tuple[int, ...]
    weight: Values
    states: Mapping[Kind, Values] = field(default_factory=dict)
    update_count: int = 0
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """A parameter group of the optimizer: the names of its parameters and its hyper-parameters."""

    names: Sequence[str]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        format: the name of the checkpoint's format.
        tensors: the parameters, in the model's order if the format records it.
        aliases: for each further name of a tied parameter, the name that the parameter has in `tensors`.
        buffers: the model's buffers.
        step: the number of steps that the checkpoint's run had made; 0 for weights alone.
        skipped_steps: how many of the steps were skipped, because a gradient was not finite.
        samples: the number of samples in all steps.
        groups: the optimizer's parameter groups; None: the checkpoint has none.
        lr_scheduler: the state of the learning-rate scheduler; None: there is none.
        loss_scale: the state of a dynamic loss scale, as LossScaler has it; None: there is none.
        user: the values that the user had added to the checkpoint.
        left_out: names of the checkpoint's entries that are not imported.
    """

    format: str
    tensors: Sequence[CheckpointTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0
    skipped_steps: int = 0
    samples: int = 0
    groups: Sequence[ParameterGroup] | None = None
    lr_scheduler: Mapping[str, Any] | None = None
    loss_scale: Mapping[str, Any] | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TensorValues:
    """The elements of a torch tensor whose memory is mapped from the checkpoint's file."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, target: torch.Tensor, offset: int) -> None:
        target.copy_(self.tensor.reshape(-1)[offset : offset + target.numel()])
