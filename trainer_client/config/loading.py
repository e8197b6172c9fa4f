"""The reading of a training config: from a file or a dict to a checked TrainingConfig.

This module owns the order of the steps: dotted keys, older names, keys that nothing reads, "auto", the types of keys,
and then the keys that restrict each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from paramserver.contract.address import ADDRESS_VARIABLE
from trainer_client.config.automatic import resolve_automatic
from trainer_client.config.config_file import read_config_file
from trainer_client.config.explanation import TypedSection, explain
from trainer_client.config.older_names import with_todays_names
from trainer_client.config.top_level import with_sections, without_unknown
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError
from trainer_client.optimizers.registry import OPTIMIZERS, canonical_name, why_refused
from trainer_client.schedules.registry import SCHEDULES, why_schedule_refused

# The keys that configure a daemon that the job starts. They are refused beside the address of a daemon that an operator
# runs, because that daemon has a config of its own.
_DAEMON_KEYS = ("state_dir", "host_budget", "nvme_budget")
# The keys with which a client connects to a daemon that an operator runs. They are refused if the job starts a daemon
# of its own, except that `insecure` is also allowed for a collector of traces.
_CREDENTIAL_KEYS = ("token_file", "tls", "insecure")

# The sections of the config whose keys depend on their key `type`.
_CHOICES = {
    "optimizer": TypedSection(names=OPTIMIZERS, why_refused=why_refused),
    "scheduler": TypedSection(names=SCHEDULES, why_refused=why_schedule_refused),
}

# A top-level key of the config that begins with one of these strings is a comment, because JSON has no comments and
# DeepSpeed reads no such key.
_COMMENTS = ("_", "#", "//", "comment")


def load_config(
    source: Mapping[str, Any] | str | Path, environ: Mapping[str, str], dtypes: Collection[torch.dtype] = ()
) -> TrainingConfig:
    """Read and check the config, and return it.

    Args:
        source: the config as a dict, or the path of a JSON file.
        environ: the environment of the process; only its PARAMSERVER_ variables are read.
        dtypes: the dtypes of the model's floating-point parameters, from which bf16 and fp16 follow where they are
            "auto"; empty: there is no model yet, and parameters keep their own dtype.

    Raises:
        ConfigError: the message names each refused key in full, its value, and what to write instead.
    """
    written = source if isinstance(source, Mapping) else read_config_file(Path(source))
    raw = {str(key): value for key, value in written.items() if not str(key).startswith(_COMMENTS)}
    raw, overridden = with_sections(raw, TrainingConfig)
    raw, unknown = without_unknown(with_todays_names(raw), TrainingConfig)
    raw = _with_canonical_type(raw)
    raw, automatic = resolve_automatic(raw, TrainingConfig, dtypes)
    try:
        config = TrainingConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, TrainingConfig, _CHOICES)) from None
    config.note_automatic(tuple(automatic))
    config.note_ignored(overridden | unknown)
    _check_together(config, environ)
    return config


def _with_canonical_type(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config with another name of its optimizer, such as "FusedAdam", replaced by the store's name."""
    section = raw.get("optimizer")
    if isinstance(section, Mapping) and isinstance(name := section.get("type"), str):
        return {**raw, "optimizer": {**section, "type": canonical_name(name)}}
    return raw


def _check_together(config: TrainingConfig, environ: Mapping[str, str]) -> None:
    """Check the keys that restrict each other. It can raise ConfigError, which names the keys and the remedy."""
    _check_precision(config)
    if config.gradient_clipping and config.paramserver.gradient_clipping_value is not None:
        raise ConfigError(
            f"gradient_clipping = {config.gradient_clipping} (by norm) and paramserver.gradient_clipping_value = "
            f"{config.paramserver.gradient_clipping_value} (by value) are both given: choose one"
        )
    if config.gradient_clipping and config.paramserver.early_updates == "final":
        raise ConfigError(
            f'gradient_clipping = {config.gradient_clipping} and paramserver.early_updates = "final" are both given: a '
            "clipped update waits for the norm of all gradients, so none is final before that; set early_updates to "
            "true, or gradient_clipping to 0"
        )
    norm = 0.0 if config.optimizer is None else config.optimizer.params.max_grad_norm
    if norm not in (0.0, config.gradient_clipping):
        raise ConfigError(
            f"optimizer.params.max_grad_norm = {norm} is refused: it is not an argument of the optimizer; write "
            "gradient_clipping"
        )
    if config.gradient_allreduce_op == "sum" and config.zero_optimization.stage == 3:
        raise ConfigError(
            "gradient_allreduce_op = 'sum' is not supported with ZeRO stage 3, as in DeepSpeed: multiply the loss by "
            "the number of ranks, and remove the key"
        )
    units = config.paramserver.units
    if units.classes and units.max_parameters:
        raise ConfigError("paramserver.units.classes and paramserver.units.max_parameters are both set: choose one")
    address = config.store_address(environ)
    if address is None:
        _check_own_daemon(config)
        return
    config.credentials(environ)
    origin = "paramserver.address" if config.paramserver.address else f"${ADDRESS_VARIABLE}"
    if ours := [f"paramserver.{key}" for key in _DAEMON_KEYS if key in config.paramserver.model_fields_set]:
        raise ConfigError(
            f"{', '.join(ours)}: the daemon at {address} ({origin}) has its own config for this; remove it here"
        )


def _check_precision(config: TrainingConfig) -> None:
    """Check that the config chooses one number format. It can raise ConfigError."""
    if config.bf16.enabled and config.fp16.enabled:
        raise ConfigError("bf16.enabled and fp16.enabled are both true: choose one")
    chosen = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else "fp32"
    dtype = config.value_at("data_types.param_dtype")
    if dtype not in (None, chosen):
        raise ConfigError(
            f"data_types.param_dtype = {dtype!r}, but bf16 and fp16 say {chosen}: enable the one that is meant, or "
            "remove the key"
        )


def _check_own_daemon(config: TrainingConfig) -> None:
    """Check that the config fits a daemon that the job itself starts. It can raise ConfigError."""
    paths = config.nvme_paths()
    if len(set(paths.values())) > 1 and config.paramserver.state_dir is None:
        listed = ", ".join(f"{key} = {str(path)!r}" for key, path in paths.items())
        raise ConfigError(f"the store has one directory, but {listed}: write the same path in both")
    used = () if config.paramserver.telemetry is None else ("insecure",)
    given = config.paramserver.model_fields_set.difference(used)
    if unused := [f"paramserver.{key}" for key in _CREDENTIAL_KEYS if key in given]:
        raise ConfigError(
            f"{', '.join(unused)}: the job starts a daemon of its own, which asks for none; set "
            "paramserver.address, or remove it"
        )
