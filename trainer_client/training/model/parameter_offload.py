"""DeepSpeed's `engine.optimizer.parameter_offload`, whose hooks programs remove before they generate text at stage 3.

TRL gathers all parameters, removes the hooks of this object, generates, and registers the hooks again. The engine's own
hooks can stay meanwhile, because they do not gather units that are gathered already. This module owns the names that
such programs use. It must never touch the engine's hooks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer_client.training.model.registered import show_external


class ParameterOffload:
    """The object that an engine at stage 3 has in place of DeepSpeed's object that gathers parameters.

    Attributes:
        module: the model. Each of its modules has the method `ds_external_parameters`, and each parameter has the set
            `ds_active_sub_modules`, which stays empty.
        forward_hooks, backward_hooks: the hooks that the caller may remove. There are none.
    """

    def __init__(self, module: nn.Module) -> None:
        """Give the modules `ds_external_parameters`, and the parameters an empty set `ds_active_sub_modules`."""
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        show_external(module)
        for parameter in module.parameters():
            vars(parameter)["ds_active_sub_modules"] = set()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing where DeepSpeed registers its hooks again, because the engine's hooks were never removed."""
