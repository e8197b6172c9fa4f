"""DeepSpeed's Lion optimizers, which are `trainer_client.Lion` with DeepSpeed's defaults."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from trainer_client.ops.arguments import note_state_dtype
from trainer_client.optimizers.lion import Lion
from trainer_client.optimizers.torch_optimizer import runs_as

__all__ = ["DeepSpeedCPULion", "FusedLion"]


@runs_as(Lion)
class FusedLion(Lion):
    """DeepSpeed's Lion for GPUs. Where it runs follows from the config here, as for every optimizer.

    Args:
        lr, betas: DeepSpeed's defaults are not those of the paper.
        set_grad_none: has no effect, because gradients go to the store.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


@runs_as(Lion)
class DeepSpeedCPULion(Lion):
    """DeepSpeed's Lion for states in host memory. Where it runs follows from the config here.

    Args:
        lr, betas: DeepSpeed's defaults are not those of the paper.
        fp32_optimizer_states: has no effect, because the store keeps all states in fp32.

    Raises:
        ConfigError: an argument is not honoured.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        note_state_dtype("DeepSpeedCPULion", fp32_optimizer_states)
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
