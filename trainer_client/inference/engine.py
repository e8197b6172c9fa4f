"""The engine for inference: a model whose weights are a committed step in the store.

The engine holds the hooks and the leases until it is closed. This module must never change a weight, and never write to
the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from paramserver.contract.sizes import shown_size
from trainer_client.base import at_exit
from trainer_client.client.transport.own_process import OwnProcess
from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.config.training_config import TrainingConfig
from trainer_client.inference.base import ComputingEngine
from trainer_client.inference.hooks import InferenceHooks
from trainer_client.inference.residency import WeightResidency
from trainer_client.inference.weights import StepWeights
from trainer_client.training.model.owners import disown, own
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.refusals import copy_gathered, find_conversion
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.context import Resources
from trainer_client.training.run.forgotten import Remains

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParts:
    """The objects that opening.py makes for an engine for inference, and that the engine calls and closes."""

    weights: StepWeights
    residency: WeightResidency
    hooks: InferenceHooks
    parameters: tuple[ModelParameter, ...]


class InferenceEngine(ComputingEngine):
    """The engine that `initialize` without an optimizer and `init_inference` return.

    It computes what the model computes, bit for bit: `engine(batch)`, `engine.generate(...)`, or the model itself. It
    has no backward pass. It has the same getters for the config and the batch sizes as the engine of a training loop.
    An attribute that the engine does not have is looked up in the model.

    Attributes:
        module: the model.
        job: the name of the job in the store.
        step_number: the committed step whose weights the model has.
        device: where the model computes.
        local_rank: the number of this rank on its node.
    """

    _refusing = "an engine for inference: it has no optimizer and changes nothing in the store"

    def __init__(
        self,
        model: nn.Module,
        parts: InferenceParts,
        settings: TrainingConfig,
        sizes: BatchSizes,
        collectives: Collectives,
        local_rank: int,
        resources: Resources,
    ) -> None:
        """Make the engine of a model whose weights and hooks opening.py has prepared.

        Args:
            collectives: the collectives with which the model was opened. The engine itself does not communicate.
            resources: what the engine takes over, and closes when it is closed.
        """
        super().__init__(model, settings, sizes, collectives, local_rank, resources.all.pop_all())
        self.job = parts.weights.job
        self.step_number = parts.weights.step
        self._parts = parts
        self._closed = False
        self._process = OwnProcess()
        self.eval()
        self._refusal = model.register_state_dict_pre_hook(self._refuse_released)
        self._copying = model.register_state_dict_post_hook(copy_gathered)
        own(parts.parameters, self)
        self._remains = Remains(self, resources.apart)
        at_exit.register(self, InferenceEngine.close)
        log.info(
            "the model has the weights of step %d of job %r; %s of them stay in memory, %s",
            *(self.step_number, self.job, shown_size(parts.residency.kept_bytes)),
            "the others are fetched for each use" if parts.residency.streams else "which are all",
        )

    @property
    def config(self) -> Any:
        """The model's own config, if it has one, as in DeepSpeed's engine for inference; else the training config.

        Models of transformers have a config, which `generate` and other functions for inference read.
        """
        return self.module.config if hasattr(self.module, "config") else super().config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward without gradients, and return its output.

        Raises:
            SessionEndedError: the store had ended this process's session, so the output was discarded. The next call
                uses a new session.
            StoreError: the store failed, or did not come back in time.
        """
        args, kwargs = self._cast(args, kwargs)
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's `generate`, without gradients.

        Raises:
            AttributeError: the model has no such method.
        """
        with torch.no_grad():
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters, under all of their names, and the buffers by name, as copies on the CPU."""
        self._require_open()
        weights = self._parts.weights
        copies: dict[int, torch.Tensor] = {}
        for parameter in self._parts.parameters:
            tensor = weights.tensors.get(parameter.fqn)
            copies[id(parameter.tensor)] = (
                torch.empty(parameter.shape, dtype=parameter.tensor.dtype)
                if tensor is None
                else weights.read(tensor, parameter.tensor.dtype, torch.device("cpu"))
            )
        return {
            name: copies[id(entry)] if id(entry) in copies else entry.detach().cpu().clone()
            for name, entry in self.module.state_dict(keep_vars=True).items()
            if isinstance(entry, torch.Tensor)
        }

    def train(self, mode: bool = True) -> Self:
        """Set train or eval mode in the model's modules, on which for example dropout depends.

        The engine refuses to train in either mode.
        """
        super().train(mode)
        return self

    def close(self) -> None:
        """Release the weights, and stop the daemon that belongs to the engine. A repeated call has no effect.

        The model has no weights afterwards, and its forward raises RuntimeError. In a forked child process this call
        has no effect, because the parent still uses the engine.
        """
        if self._closed or not self._process.is_here:
            return
        self._closed = True
        at_exit.unregister(self)
        self._remains.close_no_more()
        self._refusal.remove()
        self._copying.remove()
        disown(self._parts.parameters)
        super().close()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Return the engine if `fn`, the conversion of `to` or `half`, would change no tensor; else refuse the call.

        Raises:
            RuntimeError: `fn` gives tensors another device or dtype than the stored weights have.
        """
        tensors = (*self.parameters(), *self.buffers())
        if (conversion := find_conversion(fn, tensors, self.device)) is not None:
            before, after = conversion
            raise RuntimeError(
                f"the weights of an engine for inference stay {before}, and cannot become {after}: pass dtype= when "
                "the engine is made, or remove the call"
            )
        return self

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine for inference is closed")

    def _refuse_released(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse `state_dict()` if some weights do not stay in memory, unless `keep_vars` asks for the parameters."""
        if self._parts.residency.streams and not keep_vars:
            raise RuntimeError(
                "not all of the model's weights are in memory: call engine.full_state_dict() instead of state_dict()"
            )
