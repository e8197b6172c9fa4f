"""The stand-in for DeepSpeed in `accelerate launch --use_deepspeed`: in the command's own process, and in its ranks.

Accelerate asks for a package `deepspeed` before it starts ranks and again in each rank, and no line of a script runs
before the first question. torch calls `register` whenever it is imported, because pyproject.toml names it in the group
`torch.backends`, and Accelerate imports torch before it asks. This module owns that hook. It must be cheap, because all
programs of the environment run it, must never raise, because torch could not be imported then, and must never come
before a DeepSpeed that is installed. It is no part of the package `paramserver`, because a script may have that name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_NAME = "deepspeed"
# The variable by which `accelerate launch` tells its ranks that they are to use DeepSpeed.
_CHOSEN = "ACCELERATE_USE_DEEPSPEED"
_COMMANDS = frozenset({"accelerate", "accelerate-launch"})
_MODULES = frozenset({"accelerate.commands.accelerate_cli", "accelerate.commands.launch"})


class _LastFinder:
    """Finds `deepspeed` in this library where all other finders have found none."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to import `deepspeed`; None for all other modules."""
        if name != _NAME:
            return None
        # The import takes seconds, so only a program that asks for DeepSpeed pays for it. It puts its own finder in
        # front, which finds the submodules and the distribution's metadata, too.
        importlib.import_module("trainer_client.as_deepspeed")
        return importlib.util.find_spec(name)


def register() -> None:
    """Have `deepspeed` found in this library by `accelerate launch` and its ranks. Idempotent."""
    if _is_wanted() and _LastFinder not in sys.meta_path:
        sys.meta_path.append(_LastFinder)


def _is_wanted() -> bool:
    """Return whether this process is the command `accelerate`, or a rank that it has told to use DeepSpeed."""
    if os.environ.get(_CHOSEN, "").lower() == "true":
        return True
    if Path(sys.argv[0]).name in _COMMANDS:
        return True
    # While Python imports the packages around a module that it is to run, `sys.argv` does not have its name yet.
    return any(word == "-m" and name in _MODULES for word, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False))
