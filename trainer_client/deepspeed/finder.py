"""The import of DeepSpeed's modules below `trainer_client`. They have no files: names.py has a table of them.

When a module of the table is imported, it gets the names that the table lists for it. Its submodules are imported when
they are used. This module owns the finder, which must find no module that the table does not have.
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
    """A loader that puts another module in the place of the imported one.

    Args:
        target: the other module's name.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python makes an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the target module, and enter it in `sys.modules` under the name of the imported one."""
        sys.modules[module.__name__] = importlib.import_module(self._target)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the target module, which `python -m` with the alias then runs. None if it has no code."""
        spec = find_spec(self._target)
        return spec.loader.get_code(self._target) if spec and isinstance(spec.loader, InspectLoader) else None


class _Row(Loader):
    """A loader that fills a module of DeepSpeed with the names that the table of names.py lists for it."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python makes an empty module, which `exec_module` fills."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module the names that the table lists for it, and a `__getattr__` that imports its submodules."""
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
                # This module of `deepspeed` has a submodule and an object of the same name. A later import of the
                # submodule would overwrite the object, so the submodule is imported before the object is set.
                find_below(name)
            if isinstance(place, names.Instead):
                attributes[name] = _not_built(module.__name__, name, place)
            elif place != names.BELOW:
                attributes[name] = getattr(importlib.import_module(_PACKAGE + place), there)


class _Finder(MetaPathFinder):
    """The entry of `sys.meta_path` by which Python imports the modules of DeepSpeed that are in names.py's table."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec by which Python imports a module; None if the table does not have the module."""
        row = name.removeprefix(_PACKAGE)
        if row == name or row not in names.TABLE:
            return None
        whole = names.whole_module(row)
        loader = _Row() if whole is None else Alias(_PACKAGE + whole)
        return ModuleSpec(name, loader, origin=names.__file__, is_package=bool(names.modules_below(row)))


def install_finder() -> None:
    """Make the modules of DeepSpeed that are in names.py's table importable from now on.

    The finder is put before all other finders, because an installed package has directories with stubs of the same
    names, which Python would otherwise import as empty packages.
    """
    sys.meta_path.insert(0, _Finder())


def _not_built(module: str, name: str, remedy: str) -> type[NotBuilt] | Callable[..., NoReturn]:
    """Return a class or function that raises NotBuiltError, in place of one of DeepSpeed's that is not built."""
    if name[0].isupper():
        return type(name, (NotBuilt,), {"__module__": module, "__doc__": f"DeepSpeed's {name}."}, remedy=remedy)

    def refused(*_: Any, **__: Any) -> NoReturn:
        refuse(name, remedy)

    refused.__name__ = refused.__qualname__ = name
    refused.__module__ = module
    refused.__doc__ = f"Refuse DeepSpeed's {name}. It raises NotBuiltError."
    return refused
