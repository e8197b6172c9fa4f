"""The engine's methods that return, load and write the weights of the whole model.

This module owns the names under which whole models are loaded, and the file of 16-bit weights. It must never change a
weight outside of a change that changes.py commits. `training/access.py` reads and changes the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from paramserver.contract.durable_files import make_directory, replace
from trainer_client.engine.changes import StateChanges
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.errors import ConfigError
from trainer_client.training.access import StateDictNames

# The engine is a module whose child `module` is the model, so the names of the model's parameters begin with this
# prefix in a state dict of the engine.
_PREFIX = "module."


class WholeModel:
    """The weights of the whole model, by name."""

    def __init__(self, loop: TrainingLoop, changes: StateChanges) -> None:
        """Serve the calls of one engine."""
        self._loop, self._changes = loop, changes
        self._refusals = loop.refusals
        self._collectives = loop.rank.collectives
        self._access = loop.parts.access
        self._commits = loop.parts.commits

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the model's state by name, on the CPU: fp32 (master) weights; buffers and extra states as they are.

        All ranks must call this.

        A plain copy of the model, without an engine, can load the dict with `strict=True`.

        Args:
            rank0_only: whether only rank 0 gets the state. The other ranks take part, and get an empty dict.
        """
        self._loop.require_open()
        with self._refusals.allow_empty():
            return self._access.full_state_dict(keep=not rank0_only or self._collectives.rank == 0)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> StateDictNames:
        """Set the model's weights, buffers and extra states, between two steps, in a commit. All ranks must call this.

        Optimizer states stay as they are. Every rank must give the same values. A module may put entries of its own
        into its state dict (by a state-dict hook). Such entries are given to the module, and no commit contains them.

        Args:
            state_dict: values by name, as `full_state_dict` or the model's `state_dict` returned them, in any
                floating-point dtype. The names may all begin with "module.".
            strict: whether the names must be exactly those of the model.
            assign: only False is possible, because parameters keep their memory.

        Returns:
            `missing_keys` and `unexpected_keys`, as torch does.

        Raises:
            RuntimeError: the names are not those of the model, or a step is under way; nothing was changed.
            ConfigError: a shape does not fit, or `assign` was given.
        """
        if assign:
            raise ConfigError("load_state_dict(assign=True): the engine's parameters keep their memory; leave it out")
        self._loop.require_between_steps("load_state_dict()")
        found = self._access.compare_names(state_dict)
        if found.unexpected_keys and all(name.startswith(_PREFIX) for name in state_dict):
            # A model may have a child that is called `module`. So the prefix is removed from the given names only if
            # more of them are names of the model without it.
            unprefixed = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
            compared = self._access.compare_names(unprefixed)
            if len(compared.unexpected_keys) < len(found.unexpected_keys):
                state_dict, found = unprefixed, compared
        if strict and (found.missing_keys or found.unexpected_keys):
            raise RuntimeError(
                f"load_state_dict(): missing are {', '.join(found.missing_keys) or 'none'}; unexpected are "
                f"{', '.join(found.unexpected_keys) or 'none'}: give the model's own state, or strict=False"
            )
        changes = self._access.weight_changes(state_dict)
        # The modules' own functions that load their entries run before the change of states begins, because an error
        # within such a change ends the run.
        self._access.load_own_entries(state_dict)
        with self._changes.changing():
            self._access.set_beside_parameters(state_dict)
            self._access.hand_over(changes, self._commits.next)
            self._changes.commit()
        return found

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights as forward computes with them to a file that `torch.load` reads. All ranks must call this.

        Rank 0 writes, and needs host memory for all of these weights. Tied names share one tensor in the file. The file
        is complete when it appears, because it is synced and renamed at the end.

        Args:
            save_dir: directory of the file, made if need be.

        Returns:
            True.

        Raises:
            OSError, RuntimeError: rank 0 could not write the file; OSError on rank 0, RuntimeError on the others.
        """
        self._loop.require_open()
        weights = self._parameter_state_dict(exclude_frozen_parameters)
        failure: OSError | None = None
        if self._collectives.rank == 0:
            try:
                _save(weights, Path(save_dir) / save_filename)
            except OSError as error:
                failure = error
        (has_failed,) = self._collectives.any_rank([failure is not None], "save_16bit_model()")
        if has_failed:
            raise failure or RuntimeError("save_16bit_model(): rank 0 could not write the file; see its message")
        return True

    def consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the weights as forward computes with them on rank 0, and None on the others. All ranks must call this.

        Accelerate and the Trainer of transformers call it as `_zero3_consolidated_16bit_state_dict` to save the model.
        """
        self._loop.require_open()
        weights = self._parameter_state_dict(exclude_frozen_parameters)
        return weights if self._collectives.rank == 0 else None

    def _parameter_state_dict(self, exclude_frozen_parameters: bool) -> dict[str, Any]:
        """Return the weights as forward computes with them on rank 0, else an empty dict. All ranks must call this."""
        with self._refusals.allow_empty():
            return self._access.parameter_state_dict(
                keep=self._collectives.rank == 0, with_frozen=not exclude_frozen_parameters
            )


def _save(weights: Mapping[str, Any], path: Path) -> None:
    """Write `weights` to `path` by `torch.save`. The file appears when it is complete. It can raise OSError."""

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(weights, file)
        except RuntimeError as error:
            # If a write to the file fails with OSError, torch.save raises RuntimeError about the unfinished file in its
            # place. The OSError is the context of that error, and says more, so it is raised instead.
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else OSError(f"{path} cannot be written: {error}") from None

    make_directory(path.parent)
    replace(path, write)
