"""The arguments of DeepSpeed's optimizers that would change what an update computes."""

from __future__ import annotations

import logging

from trainer_client.errors import ConfigError

log = logging.getLogger(__name__)

# Each argument's only value that is honoured, and the reason.
_HONOURED = {
    "amsgrad": (False, "the store has no kernel with AMSGrad"),
    "bias_correction": (
        True,
        "this class is torch's Adam, which always corrects the bias; the config's optimizer.params.bias_correction is "
        "honoured, without an optimizer that is passed to initialize()",
    ),
}


def check_arguments(name: str, **arguments: bool) -> None:
    """Check arguments of the optimizer `name`. Raise ConfigError for the first one that is not honoured."""
    for argument, value in arguments.items():
        honoured, reason = _HONOURED[argument]
        if bool(value) is not honoured:
            raise ConfigError(f"{name}({argument}={value}) is not honoured: {reason}; leave it out")


def note_state_dtype(name: str, fp32_optimizer_states: bool) -> None:
    """Log that the argument of the optimizer `name` has no effect, if it asks for states in bf16."""
    if not fp32_optimizer_states:
        log.warning("%s(fp32_optimizer_states=False) has no effect: the store keeps all states in fp32", name)
