"""The import of DeepSpeed's modules below `trainer_client`, which are rows of a table and no files.

A module gets its names when it is imported, and the modules below it when they are used. This module owns the finder.
It must find no module that the table does not have.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, NoReturn

from trainer_client.base.not_built import NotBuilt, refuse
from trainer_client.deepspeed import names

_PACKAGE = "trainer_client."


class Alias(Loader):
    """Puts another module in the place of the one that is imported.

    Args:
        target: the other module's name.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """Have Python make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the other module, and enter it under the name of the one that is imported."""
        sys.modules[module.__name__] = importlib.import_module(self._target)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the other module's code, for `python -m`."""
        spec = find_spec(self._target)
        return spec.loader.get_code(self._target) if spec and isinstance(spec.loader, InspectLoader) else None


class _Row(Loader):
    """Makes a module of its row in the table."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Have Python make an empty module, which `exec_module` fills."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names, and a way to the modules below it."""
        path, attributes = module.__name__.removeprefix(_PACKAGE), vars(module)
        below, own = names.modules_below(path), list(names.names_of(path))

        def find_below(name: str) -> ModuleType:
            if name in below:
                return importlib.import_module(f"{module.__name__}.{name}")
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        attributes["__doc__"] = f"DeepSpeed's `deepspeed.{path}`; docs/deepspeed.md says what its names do here."
        attributes["__all__"] = names.public_names(path)
        attributes["__getattr__"] = find_below
        attributes["__dir__"] = lambda: sorted({*attributes, *below})
        for name, place, there in own:
            if name in below and place != names.BELOW:
                # A later import of this module would put the module in the place of the name.
                find_below(name)
            if isinstance(place, names.Instead):
                attributes[name] = _not_built(module.__name__, name, place)
            elif place != names.BELOW:
                attributes[name] = getattr(importlib.import_module(_PACKAGE + place), there)


class _Finder(MetaPathFinder):
    """Finds the modules of the table."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to import a module; None if the table does not have it."""
        row = name.removeprefix(_PACKAGE)
        if row == name or row not in names.TABLE:
            return None
        whole = names.whole_module(row)
        loader = _Row() if whole is None else Alias(_PACKAGE + whole)
        return ModuleSpec(name, loader, origin=names.__file__, is_package=bool(names.modules_below(row)))


def install_finder() -> None:
    """Make the modules of the table importable from now on.

    The finder is the first one, because an installed package has folders with stubs of the same names.
    """
    sys.meta_path.insert(0, _Finder())


def _not_built(module: str, name: str, remedy: str) -> type[NotBuilt] | Callable[..., NoReturn]:
    """Return the class or the function in place of one of DeepSpeed's that is not built."""
    if name[0].isupper():
        return type(name, (NotBuilt,), {"__module__": module, "__doc__": f"DeepSpeed's {name}."}, remedy=remedy)

    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(name, remedy)

    refused.__name__ = refused.__qualname__ = name
    refused.__module__ = module
    refused.__doc__ = f"Refuse DeepSpeed's {name}. It raises NotBuiltError."
    return refused
