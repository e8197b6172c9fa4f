"""DeepSpeed's optimizers, with their arguments, as optimizers that the store runs.

Each class is derived from torch's optimizer or from `trainer_client.Lion`, so its objects also work without the store.
A class must never compute another update than the class of DeepSpeed that it stands for; docs/deepspeed.md says where
DeepSpeed's own kernels round differently.
"""

from __future__ import annotations

import logging

import torch
from torch.optim.optimizer import ParamsT

from trainer_client.errors import ConfigError
from trainer_client.optimizers.lion import Lion
from trainer_client.optimizers.torch_optimizer import runs_as

log = logging.getLogger(__name__)

# For each of these arguments of DeepSpeed's optimizer classes: the only value that is accepted, and the reason why any
# other value is refused.
_HONOURED = {
    "amsgrad": (False, "the store has no kernel with AMSGrad"),
    "bias_correction": (
        True,
        "this class is torch's Adam, which always corrects the bias; the config's optimizer.params.bias_correction is "
        "honoured, without an optimizer that is passed to initialize()",
    ),
}


@runs_as(torch.optim.Adam)
class FusedAdam(torch.optim.Adam):
    """DeepSpeed's Adam for GPUs. Here the config decides where it runs, as for every optimizer.

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
        _check_arguments("FusedAdam", bias_correction=bias_correction, amsgrad=amsgrad)
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adam_w_mode
        )


@runs_as(torch.optim.Adam)
class DeepSpeedCPUAdam(torch.optim.Adam):
    """DeepSpeed's Adam for states in host memory. Here the config decides where it runs, as for every optimizer.

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
        _check_arguments("DeepSpeedCPUAdam", bias_correction=bias_correction, amsgrad=amsgrad)
        _note_state_dtype("DeepSpeedCPUAdam", fp32_optimizer_states)
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=adamw_mode
        )


@runs_as(torch.optim.Adagrad)
class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """DeepSpeed's Adagrad for states in host memory. Here the config decides where the optimizer runs.

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
        _check_arguments("DeepSpeedCPUAdagrad", amsgrad=amsgrad)
        _note_state_dtype("DeepSpeedCPUAdagrad", fp32_optimizer_states)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


@runs_as(Lion)
class FusedLion(Lion):
    """DeepSpeed's Lion for GPUs. Here the config decides where it runs, as for every optimizer.

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
    """DeepSpeed's Lion for states in host memory. Here the config decides where the optimizer runs.

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
        _note_state_dtype("DeepSpeedCPULion", fp32_optimizer_states)
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


def _check_arguments(name: str, **arguments: bool) -> None:
    """Raise ConfigError if an argument of the optimizer `name` does not have the only value that is honoured.

    Args:
        name: the name of the optimizer's class, for the message.
        arguments: the values that the script has passed, by the arguments' names. For example, `amsgrad` must be false,
            because the store has no kernel with AMSGrad.
    """
    for argument, value in arguments.items():
        honoured, reason = _HONOURED[argument]
        if bool(value) is not honoured:
            raise ConfigError(f"{name}({argument}={value}) is not honoured: {reason}; leave it out")


def _note_state_dtype(name: str, fp32_optimizer_states: bool) -> None:
    """Log that the argument of the optimizer `name` has no effect, if it asks for states in bf16."""
    if not fp32_optimizer_states:
        log.warning("%s(fp32_optimizer_states=False) has no effect: the store keeps all states in fp32", name)
