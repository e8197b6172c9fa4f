"""DeepSpeed's `engine.optimizer.parameter_offload`, which programs take apart before they generate at stage 3.

TRL gathers all parameters, removes the hooks of this object, generates, and has them registered again. The hooks of the
engine need not go for that, because they gather nothing that is gathered already. This module owns the names. It must
never touch the engine's hooks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer_client.training.model.registered import show_external


class ParameterOffload:
    """What an engine at stage 3 shows under the name of DeepSpeed's part that gathers parameters.

    Attributes:
        module: the model. Each of its modules has the method `ds_external_parameters`, and each parameter has the set
            `ds_active_sub_modules`, which stays empty.
        forward_hooks, backward_hooks: the hooks that the caller may remove. There are none.
    """

    def __init__(self, module: nn.Module) -> None:
        """Give the model's modules and parameters DeepSpeed's names."""
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        show_external(module)
        for parameter in module.parameters():
            vars(parameter)["ds_active_sub_modules"] = set()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Return at once, because the engine's hooks have stayed where they are."""
