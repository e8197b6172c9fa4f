"""DeepSpeed's Adagrad, which is torch's without a decay of the learning rate."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from trainer_client.ops.arguments import check_arguments, note_state_dtype
from trainer_client.optimizers.torch_optimizer import runs_as

__all__ = ["DeepSpeedCPUAdagrad"]


@runs_as(torch.optim.Adagrad)
class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """DeepSpeed's Adagrad for states in host memory. Where it runs follows from the config here.

    Args:
        amsgrad: only False is honoured.
        fp32_optimizer_states: has no effect, because the store keeps all states in fp32.

    Raises:
        ConfigError: an argument is not honoured.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_arguments("DeepSpeedCPUAdagrad", amsgrad=amsgrad)
        note_state_dtype("DeepSpeedCPUAdagrad", fp32_optimizer_states)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
