"""The check that `paramserver` is this project's package, before anything is imported from it.

If a `paramserver.py` or a folder of that name lies beside the user's script, Python finds that first. Without this
check the user would see an error about a missing module, which does not name the cause.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def check_own_packages() -> None:
    """Check that the package `paramserver` that Python finds lies beside this package.

    Raises:
        ImportError: Python finds another module of that name; the message has its path.
    """
    root, spec = Path(__file__).parents[2], find_spec("paramserver")
    if spec is None:
        # Python finds no package `paramserver` at all. No error is raised here, because the import of `paramserver`
        # that follows raises one that says so.
        return
    # The spec of a package without an __init__.py has no `origin`, so its folders are checked instead.
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    if not any(Path(place).resolve().is_relative_to(root.resolve() / "paramserver") for place in places):
        raise ImportError(
            f"{', '.join(places)} is found in place of the package 'paramserver' in {root}: rename it, or take its "
            "directory out of PYTHONPATH",
            name="paramserver",
        )
