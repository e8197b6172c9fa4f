"""The entry point of both commands, and of a daemon that a trainer starts by running this file.

This module must import nothing of the project before `use_own_packages` has run. The names `paramserver` and `storage`
are common: a `storage.py` in the working directory (`python -m` looks there first) or in a directory of PYTHONPATH
would be imported in place of this project's package. `use_own_packages` also makes the verbs come from this project's
`trainer_client`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("paramserver", "storage", "trainer_client")


class _OwnPackages(MetaPathFinder):
    """The first import finder: finds the project's packages beside this one, and leaves other names to `sys.path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(_ROOT)]) if fullname in _PACKAGES else None


def use_own_packages() -> None:
    """From now on, import the project's packages from the directory that holds this package.

    Raises:
        SystemExit: a foreign module is imported already under one of their names, for example by sitecustomize.py.
    """
    for name in _PACKAGES:
        if (module := sys.modules.get(name)) is not None:
            # A package's directory without an __init__.py becomes a module with no __file__, so its path is taken from
            # __path__.
            place = Path(module.__file__ or next(iter(module.__path__)))
            if place not in (_ROOT / name / "__init__.py", _ROOT / name):
                sys.exit(
                    f"paramserver: {place} was imported in place of the package {name!r} in {_ROOT}: rename it, or "
                    "take its directory out of PYTHONPATH and of what sitecustomize.py and .pth files import"
                )
    sys.meta_path.insert(0, _OwnPackages())


def open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that the parent process has closed.

    Without this, the event loop or a data file would get descriptor 0, 1 or 2. Libraries write their messages to these,
    and libuv aborts when it closes one of them.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The standard streams are examined in order, so `number` is the lowest free descriptor, and that is what
            # `open` returns.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def leave_deleted_directory() -> None:
    """Change to / if the working directory was deleted.

    MKL ends a process in a deleted working directory when torch loads it.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def main() -> None:
    """Prepare the process and run the command `paramserver` with its arguments."""
    use_own_packages()
    open_standard_streams()
    leave_deleted_directory()
    from paramserver.cli import main as run  # noqa: PLC0415

    run()


def admin() -> None:
    """Prepare the process and run the command `paramserver-admin` with its arguments."""
    use_own_packages()
    open_standard_streams()
    leave_deleted_directory()
    from paramserver.admin.cli import main as run  # noqa: PLC0415

    run()


if __name__ == "__main__":
    main()
