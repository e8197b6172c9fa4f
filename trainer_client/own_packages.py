"""Checks that `paramserver` is this project's package, before anything is imported of it.

A `paramserver.py`, or a folder of that name, beside the user's script is found first. What follows would be an error
about a missing module, which does not say what to do.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def check_own_packages() -> None:
    """Check that `paramserver` lies beside this package.

    Raises:
        ImportError: another module has the name; the message says where it is.
    """
    root, spec = Path(__file__).parents[1], find_spec("paramserver")
    if spec is None:
        return  # The import that follows says so.
    # A folder without an __init__.py has no file.
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    if not any(Path(place).resolve().is_relative_to(root.resolve() / "paramserver") for place in places):
        raise ImportError(
            f"{', '.join(places)} is found in place of the package 'paramserver' in {root}: rename it, or take its "
            "directory out of PYTHONPATH",
            name="paramserver",
        )
