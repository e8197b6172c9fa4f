"""`import deepspeed` that imports this library, for programs that import DeepSpeed themselves.

Accelerate, the Trainer of transformers and many scripts import `deepspeed` by that name. After this line in the script,
or in a module that it imports first, they get this library:

    import trainer_client.as_deepspeed

Without a change of the script: `python -m trainer_client.as_deepspeed script.py ARGUMENTS`, or with several ranks
`torchrun --nproc-per-node 2 -m trainer_client.as_deepspeed script.py ARGUMENTS`.

This module owns the name `deepspeed`, which stands for `trainer_client`. It must never hide that another package was
meant: if DeepSpeed itself is imported already, the import of this module is an error.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType

from trainer_client.deepspeed.finder import Alias
from trainer_client.errors import ConfigError
from trainer_client.interface_version import __version__

_NAME = "deepspeed"
_OWN_NAME = "trainer_client"
# The option with which this module passes the local rank to a script. DeepSpeed and its scripts spell it with an
# underscore.
_LOCAL_RANK = "--local_rank"


class _Distribution(Distribution):
    """The package metadata of `deepspeed`, which `importlib.metadata` returns to programs that look for its version."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of the metadata file; None for every other file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {__version__}\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return the path that a file of the package `deepspeed` would have beside this package."""
        return Path(__file__).parent / path


class _DeepSpeedFinder(DistributionFinder):
    """A finder for `sys.meta_path` that has `import deepspeed`, also of its submodules, import this library."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec with which Python imports the module `name`.

        Return None if it is no module of DeepSpeed, or one that this library lacks; Python then asks other finders.
        """
        if name != _NAME and not name.startswith(f"{_NAME}."):
            return None
        own_name = _OWN_NAME + name.removeprefix(_NAME)
        try:
            is_own = importlib.util.find_spec(own_name) is not None
        except ModuleNotFoundError:
            # `find_spec` raises ModuleNotFoundError because this library has no module with the name of the parent
            # package. So the module is not one of this library, and another finder has to find it.
            is_own = False
        return ModuleSpec(name, Alias(own_name), is_package=True) if is_own else None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Yield the metadata of `deepspeed`, if the context asks for this package or for all packages."""
        if context is None or context.name in (None, _NAME):
            yield _Distribution()


def install() -> None:
    """Make `import deepspeed` import this library from now on. Idempotent.

    Raises:
        ConfigError: another package of that name is imported already.
    """
    present = sys.modules.get(_NAME)
    if present is not None and present.__name__ != _OWN_NAME:
        raise ConfigError(
            f"{_NAME} is imported already, from {present.__file__}: import trainer_client.as_deepspeed before anything "
            "that imports it (accelerate and transformers do)"
        )
    if not any(isinstance(finder, _DeepSpeedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeepSpeedFinder())


def main(arguments: Sequence[str]) -> None:
    """Run a script with the arguments that follow its path, as `python` runs it.

    Before the path, the option --local_rank puts `--local_rank=N` in front of the script's arguments, as DeepSpeed's
    launcher does. N is the number of this rank on its node.
    """
    numbered, words = arguments[:1] == [_LOCAL_RANK], list(arguments)
    if numbered:
        words.pop(0)
    if not words:
        raise SystemExit(f"usage: python -m trainer_client.as_deepspeed [{_LOCAL_RANK}] script.py ARGUMENTS")
    if numbered:
        words.insert(1, f"{_LOCAL_RANK}={os.environ.get('LOCAL_RANK', '0')}")
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


install()

if __name__ == "__main__":
    main(sys.argv[1:])
