"""The entries of a checkpoint of Lightning that are written into a manifest.

This module chooses the entries. It must never change the checkpoint itself, because callbacks may refer to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from trainer_client.errors import CheckpointError
from trainer_client.training.run.checkpoint_files import encode_user_state

# The engine saves the content of these entries of Lightning's checkpoint itself, so a manifest is without them.
_KEPT_BY_ENGINE = ("state_dict", "optimizer_states")
# The names of the entries that record the arguments with which modules were constructed. Lightning does not read these
# entries when a fit resumes from the checkpoint, so a manifest may lack some of them.
_HYPER_PARAMETERS = tuple(
    name
    for kind in (LightningModule, LightningDataModule)
    for name in (kind.CHECKPOINT_HYPER_PARAMS_KEY, kind.CHECKPOINT_HYPER_PARAMS_TYPE)
)


def manifest_entries(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint of Lightning that its manifest takes: those that no engine keeps.

    A manifest may have only values that torch loads with `weights_only=True`. Hyper-parameters of other types are left
    out with a warning, because a fit can resume from the manifest without them.
    """
    entries = {key: value for key, value in checkpoint.items() if key not in _KEPT_BY_ENGINE}
    left_out = []
    for name in (name for name in _HYPER_PARAMETERS if name in entries):
        value = entries[name]
        if isinstance(value, Mapping):
            entries[name] = {key: part for key, part in value.items() if _is_safe(part)}
            left_out += [f"{name}.{key}" for key in value if key not in entries[name]]
        elif not _is_safe(value):
            del entries[name]
            left_out.append(name)
    if left_out:
        rank_zero_warn(
            f"the checkpoint is without {', '.join(left_out)}, because torch.load(weights_only=True) refuses them; a "
            "fit goes on from it all the same. Name them in save_hyperparameters(ignore=[...])"
        )
    return entries


def _is_safe(value: Any) -> bool:
    try:
        encode_user_state({"value": value})
    except CheckpointError:
        return False
    return True
