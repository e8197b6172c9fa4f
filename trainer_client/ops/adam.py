"""DeepSpeed's Adam optimizers, which are torch's Adam with decoupled weight decay unless the script says otherwise."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from trainer_client.ops.arguments import check_arguments, note_state_dtype
from trainer_client.optimizers.torch_optimizer import runs_as

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


@runs_as(torch.optim.Adam)
class FusedAdam(torch.optim.Adam):
    """DeepSpeed's Adam for GPUs. Where it runs follows from the config here, as for every optimizer.

    Args:
        bias_correction: only True is honoured.
        adam_w_mode: whether the weight decay is decoupled, as in AdamW.
        amsgrad: only False is honoured.
        set_grad_none: has no effect, because gradients go to the store.

    Raises:
        ConfigError: an argument is not honoured.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_arguments("FusedAdam", bias_correction=bias_correction, amsgrad=amsgrad)
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )


@runs_as(torch.optim.Adam)
class DeepSpeedCPUAdam(torch.optim.Adam):
    """DeepSpeed's Adam for states in host memory. Where it runs follows from the config here, as for every optimizer.

    Args:
        bias_correction: only True is honoured.
        amsgrad: only False is honoured.
        adamw_mode: whether the weight decay is decoupled, as in AdamW.
        fp32_optimizer_states: has no effect, because the store keeps all states in fp32.

    Raises:
        ConfigError: an argument is not honoured.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_arguments("DeepSpeedCPUAdam", bias_correction=bias_correction, amsgrad=amsgrad)
        note_state_dtype("DeepSpeedCPUAdam", fp32_optimizer_states)
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adamw_mode
        )
