"""The common base of the engines without an optimizer, which compute and never train.

This module closes what an engine holds when the engine ends. It must never change a weight.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn, Self

from torch import nn

from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.config.training_config import TrainingConfig
from trainer_client.engine.getters import EngineGetters
from trainer_client.errors import PhaseError
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.step.gradients import ReductionSchedule
from trainer_client.training.step.precision import PrecisionPolicy, cast_floating_inputs


class ComputingEngine(EngineGetters):
    """The base of `InferenceEngine` and `WholeEngine`, which compute what their model computes and refuse to train.

    Attributes:
        module: the model.
        device: where the model computes.
        local_rank: the number of this rank on its node.
    """

    # The part of error messages that names the engine and says why it refuses to train.
    _refusing: str

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingConfig,
        sizes: BatchSizes,
        collectives: Collectives,
        local_rank: int,
        resources: ExitStack,
    ) -> None:
        """Keep the model, and what the getters for the config and the batch sizes return.

        Args:
            collectives: the collectives with which the model was opened. The engine itself does not communicate.
            resources: the exit stack that `close` closes. For example, it leaves the process group that was joined.
        """
        super().__init__()
        self.module = model
        self.device = collectives.device
        self.local_rank = local_rank
        self._settings = settings
        self._collectives = collectives
        self._micro_batches = MicroBatches(sizes, ReductionSchedule.of(settings), None)
        self._precision = PrecisionPolicy.of(settings)
        self._resources = resources
        self.training = model.training

    def _cast(self, *inputs: Any) -> Any:
        """Return the arguments of a forward, with their floating-point tensors cast to the compute dtype."""
        dtype = self._precision.compute_dtype
        return inputs if dtype is None else cast_floating_inputs(inputs, dtype)

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a backward pass. It raises PhaseError."""
        self._refuse("backward()")

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a training step. It raises PhaseError."""
        self._refuse("step()")

    def save_checkpoint(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to save a checkpoint. It raises PhaseError."""
        self._refuse("save_checkpoint()")

    def _refuse(self, what: str) -> NoReturn:
        raise PhaseError(f"{what} of {self._refusing}; pass an optimizer to initialize(), or write one into the config")

    def close(self) -> None:
        """Release all that the engine holds, for example its leases. A repeated call has no effect."""
        self._resources.close()

    def destroy(self) -> None:
        """Close the engine, as `close` does. DeepSpeed's engine has this method."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
