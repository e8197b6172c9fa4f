"""The engine without an optimizer below stage 3: the whole model on the rank's device, without a store.

Reference models of preference learning, and models that are only evaluated, use such an engine. This module decides on
which device and in which dtype the model is. It must never start a daemon, and never change a weight.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from trainer_client.config.batch_sizes import resolve_batch_sizes
from trainer_client.config.training_config import TrainingConfig
from trainer_client.engine.start import InitialArguments
from trainer_client.errors import ConfigError
from trainer_client.inference.base import ComputingEngine
from trainer_client.training.model.buffers import cast_buffers
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.run.node_store import join_ranks
from trainer_client.training.step.precision import PrecisionPolicy

log = logging.getLogger(__name__)


class WholeEngine(ComputingEngine):
    """The engine that `initialize` without an optimizer returns at stages 0 to 2.

    Its forward is the model's. Gradients are computed as torch's grad mode says, but the engine makes no step. It has
    the same getters for the config and the batch sizes as the engine of a training loop. An attribute that the engine
    does not have is looked up in the model.

    Attributes:
        module: the model, whole on the device.
        device: where the model computes.
        local_rank: the number of this rank on its node.
    """

    _refusing = "an engine without an optimizer: it trains nothing and has no store"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, and return its output. Floating-point inputs are cast to the compute dtype."""
        args, kwargs = self._cast(args, kwargs)
        with self._precision.autocast(self.device):
            return self.module(*args, **kwargs)


@torch.no_grad()
def open_whole_engine(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    settings: TrainingConfig,
    initial: InitialArguments,
    processes: tuple[bool | None, int],
) -> WholeEngine:
    """Bring a model to this rank's device, in the config's dtype, with the values of rank 0. All ranks must call this.

    Args:
        model: the model; its buffers keep their dtypes unless the config has `data_types.buffer_dtype`.
        parameters: all parameters of the model.
        settings: the config.
        initial: the source of the parameters' values: the model itself, or files.
        processes: the arguments `dist_init_required` and `distributed_port` of `initialize`.

    Raises:
        ConfigError: a parameter has no values, the ranks built the model differently, the config has no batch size, or
            it names weights in a store.
    """
    stage = settings.zero_optimization.stage
    if "inference" in settings.paramserver.model_fields_set:
        raise ConfigError(
            f"paramserver.inference names weights in a store, which zero_optimization.stage {stage} without an "
            "optimizer does not use: set zero_optimization.stage 3 to compute with them, or remove the key"
        )
    if "job" in settings.paramserver.model_fields_set:
        log.warning(
            "the model of this engine, which has no optimizer, keeps its own values: zero_optimization.stage %d has no "
            "weights of job %r in a store; set stage 3 to compute with these",
            *(stage, settings.paramserver.job),
        )
    with ExitStack() as resources:
        local_rank, collectives = join_ranks(settings, processes, resources)
        initial.take_over()
        dtype_of = PrecisionPolicy.of(settings).dtype_of
        try:
            sizes = resolve_batch_sizes(settings, collectives.world_size)
            values = initial.values(model, parameters, collectives)
            for parameter in parameters:
                whole = values.whole(parameter).to(collectives.device, dtype_of(parameter))
                parameter.tensor.data = whole.view(parameter.shape)
            for module in model.modules():
                for name, buffer in list(module.named_buffers(recurse=False)):
                    module._buffers[name] = buffer.to(collectives.device)
            cast_buffers(model, PrecisionPolicy.of(settings).buffer_dtype)
        finally:
            collectives.close()
        return WholeEngine(model, settings, sizes, collectives, local_rank, resources.pop_all())
