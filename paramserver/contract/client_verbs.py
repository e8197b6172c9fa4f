"""The verbs of both commands that read and write tensors or start trainings, and how a command finds them.

These verbs lie in packages above `paramserver`, which this package must not import. Each of them is an entry point of
the group `paramserver.verbs`, so a command finds it by its name in what is installed. pyproject.toml lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

GROUP = "paramserver.verbs"


class VerbError(Exception):
    """A verb was not carried out.

    Args:
        text: why the verb was not carried out.
        is_usage: whether the command line is wrong, or a file that it names.
    """

    def __init__(self, text: str, *, is_usage: bool = False) -> None:
        super().__init__(text)
        self.is_usage = is_usage


def load_verb(name: str) -> Callable[..., Any]:
    """Import the verb with a name, and return its function.

    Raises:
        VerbError: no installed package has this verb, or its module cannot be imported.
    """
    for verb in entry_points(group=GROUP, name=name):
        try:
            function: Callable[..., Any] = verb.load()
        except (ImportError, AttributeError) as error:
            raise VerbError(f"the verb {name!r} cannot be imported from {verb.value}: {error}") from error
        return function
    raise VerbError(
        f"the verb {name!r} is not among those that are installed (entry points of the group {GROUP!r}): install "
        "paramserver again with pip"
    )
