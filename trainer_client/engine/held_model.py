"""The model while an engine has it: its compilation, and how it becomes a plain torch module again.

This module owns the order in which hooks, tiles and refusals leave the model. It must never close the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer_client.base.device import CPU
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.training.model.owners import disown
from trainer_client.training.model.pickling import PlainPickles

log = logging.getLogger(__name__)

# The modes of torch.compile that record CUDA graphs. The engine warns of them, because each gather makes the recorded
# graphs invalid.
_RECORDING_MODES = ("reduce-overhead", "max-autotune")


class HeldModel:
    """The model of an engine, with the engine's hooks, tiles and refusals."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Hold the model of an engine."""
        self._loop = loop
        self._parameters = loop.user.parameters
        self._hooks = loop.parts.hooks
        self._tiling = loop.parts.tiling
        self._pickles = PlainPickles(loop.user.module, is_sharded=loop.is_sharded)
        self._is_held = True

    def leave(self) -> None:
        """Make the model a plain torch module. At stages 0 to 2 its parameters keep their values, on the device."""
        self._leave(self._hooks.leave_model)

    def give_up(self) -> None:
        """Make the model a plain torch module with uninitialised parameters on the CPU."""
        self._leave(self._hooks.give_up_model)

    def give_back(self, weights: dict[str, torch.Tensor]) -> None:
        """Make the model a plain torch module with these values by FQN, on the CPU. The call empties `weights`."""
        self.give_up()
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.tensor.copy_(weights.pop(parameter.fqn))

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the model in place, as `module.compile` does. docs/models.md says how to compile single units."""
        arguments = dict(compile_kwargs or {})
        if (warning := _warning_of_graphs(self._loop.rank.collectives.device, arguments.get("mode"))) is not None:
            log.warning("%s", warning)
        self._loop.user.module.compile(backend=backend, **arguments)

    def _leave(self, free_parameters: Callable[[], None]) -> None:
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
