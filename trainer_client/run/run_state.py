"""The state of a run besides its tensors: collected for each commit, and restored from one on a resume.

Owns the list of its parts. Must never encode them, because client_state.py does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer_client.config.training_config import BatchSizes
from trainer_client.run import client_state
from trainer_client.run.data_loader import TrainingLoader
from trainer_client.step.precision import LossScaler
from trainer_client.step.trace import Clock
from trainer_client.step.training_step import TrainingStep
from trainer_client.store_optimizer import StoreOptimizer

log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """The methods of a learning-rate scheduler that the engine uses."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The counters of the engine: optimizer steps, and micro-batches."""

    global_steps: int = 0
    micro_steps: int = 0


class RunState:
    """The parts of a run's state that a commit carries for this rank."""

    def __init__(
        self,
        *,
        step: TrainingStep,
        scaler: LossScaler,
        optimizer: StoreOptimizer,
        lr_scheduler: Scheduler | None,
        clock: Clock,
        batch: BatchSizes,
        data: TrainingLoader | None,
        device: torch.device,
    ) -> None:
        self._step = step
        self._scaler = scaler
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._clock = clock
        self._batch = batch
        self._data = data
        self._device = device

    def encode(self, progress: Progress, user: Mapping[str, Any]) -> bytes:
        """Return the encoded state for a commit; `user` has the user's part.

        Raises:
            ClientStateError: a value cannot be stored.
        """
        return client_state.encode(
            {
                "counters": {
                    "global_steps": progress.global_steps,
                    "skipped_steps": self._step.skipped,
                    "skipped_in_row": self._step.skipped_in_row,
                    "micro_steps": progress.micro_steps,
                    "accumulation": self._batch.accumulation,
                    "train_batch_size": self._batch.train,
                    "clock": self._clock.now,
                },
                "update_counts": self._step.update_counts,
                "scaler": self._scaler.state_dict(),
                "optimizer": self._optimizer.settings(),
                "lr_scheduler": None if self._lr_scheduler is None else self._lr_scheduler.state_dict(),
                "random": client_state.random_states(self._device),
                "data": None if self._data is None else self._data.state_dict(),
                "user": user,
            }
        )

    def restore(self, state: Mapping[str, Any]) -> Progress:
        """Restore the run from the decoded state of a commit, and return its counters. The user's part is ignored."""
        counters = state["counters"]
        self._step.go_on_from(
            update_counts=state["update_counts"],
            skipped=counters["skipped_steps"],
            skipped_in_row=counters["skipped_in_row"],
        )
        self._clock.go_on_from(counters["clock"])
        self._scaler.load_state_dict(state["scaler"])
        # The entry is None if the commit was made with another optimizer.
        if state["optimizer"] is not None:
            self._optimizer.load_settings(state["optimizer"])
        if self._lr_scheduler is not None and state["lr_scheduler"] is not None:
            self._lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self._data is not None and state["data"] is not None:
            self._data.load_state_dict(state["data"])
        client_state.restore_random_states(state["random"], self._device)
        if counters["train_batch_size"] != self._batch.train:
            log.warning(
                "the global batch was %d samples and is %d from here on: set train_batch_size to keep it",
                *(counters["train_batch_size"], self._batch.train),
            )
        micro_steps = counters["micro_steps"]
        if counters["accumulation"] != self._batch.accumulation:
            # A commit is made at the end of a step, so this is the count as if all steps had had the new number of
            # micro-batches.
            micro_steps = counters["global_steps"] * self._batch.accumulation
        return Progress(global_steps=counters["global_steps"], micro_steps=micro_steps)
