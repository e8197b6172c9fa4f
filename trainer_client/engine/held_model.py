"""The model while an engine has it: its compilation, and how it becomes a plain torch module again.

This module owns the order in which all that an engine adds to a model leaves it: hooks, tiles, refusals, the way in
which its modules are pickled, and the marks that say whose parameters they are. It must never close the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainer_client.base.device import CPU
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.training.model.owners import disown
from trainer_client.training.model.parameter_offload import ParameterOffload
from trainer_client.training.model.pickling import PlainPickles

log = logging.getLogger(__name__)

# The modes of torch.compile that record CUDA graphs. The engine warns of them, because each gather makes the recorded
# graphs invalid.
_RECORDING_MODES = ("reduce-overhead", "max-autotune")


class HeldModel:
    """The model of an engine, with the engine's hooks, tiles and refusals."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Have the model pickled as a plain one. At stage 3, give its optimizer DeepSpeed's `parameter_offload`."""
        self._loop = loop
        self._parameters = loop.user.parameters
        self._hooks = loop.parts.hooks
        self._tiling = loop.parts.tiling
        self._pickles = PlainPickles(loop.user.module, is_sharded=loop.is_sharded)
        self._is_held = True
        if loop.rank.settings.zero_optimization.stage == 3:
            loop.user.optimizer.parameter_offload = ParameterOffload(loop.user.module)

    def leave(self) -> None:
        """Make the model, whose parameters are not sharded, a plain torch module with their values, on the device."""
        self._leave(self._hooks.leave_model)

    def give_up_model(self) -> None:
        """Make the model a plain torch module with uninitialised parameters, between two steps.

        The parameters are then on the CPU, in the dtype that they have. The other ranks do not have to call this.
        Afterwards the engine cannot train any more, and every rank still has to call `close`. Committed steps stay in
        the store.
        """
        self._loop.require_between_steps("the end of the engine's use of its model")
        self._loop.was_taken_over = True
        self._leave(self._hooks.give_up_model)

    def give_back(self, weights: dict[str, torch.Tensor]) -> None:
        """Make the model a plain torch module with these values by FQN, on the CPU. The call empties `weights`."""
        self._leave(self._hooks.give_up_model)
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.tensor.copy_(weights.pop(parameter.fqn))

    def compile(self, model: nn.Module, backend: str, arguments: Mapping[str, Any]) -> None:
        """Compile the model, or what the script has set in its place; see `Engine.compile`."""
        if (warning := _warning_of_graphs(self._loop.rank.collectives.device, arguments.get("mode"))) is not None:
            log.warning("%s", warning)
        model.compile(backend=backend, **arguments)

    def _leave(self, free_parameters: Callable[[], None]) -> None:
        """Make the model a plain torch module, once.

        Args:
            free_parameters: takes the engine's hooks off, and gives the parameters plain memory.
        """
        if self._is_held:
            self._is_held = False
            free_parameters()
            self._tiling.remove()
            self._loop.refusals.remove()
            self._pickles.remove()
            disown(self._parameters)


def _warning_of_graphs(device: torch.device, mode: object) -> str | None:
    """Return a warning if a mode of torch.compile records CUDA graphs, which gathers invalidate; otherwise None."""
    if device.type == CPU or mode not in _RECORDING_MODES:
        return None
    return (
        f"engine.compile(compile_kwargs={{'mode': {mode!r}}}) records CUDA graphs, again after each gather, because a "
        "unit has another address then: use 'max-autotune-no-cudagraphs', or leave mode out"
    )
