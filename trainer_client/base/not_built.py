"""The names of DeepSpeed that are not built here. They can be imported, and their use raises an error.

Scripts import such names at their beginning, often only for an `isinstance`. So the import works, and the error is
raised where the script uses the missing feature. This module must never let a missing feature be used without an
effect.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self

from trainer_client.errors import NotBuiltError


def refuse(name: str, remedy: str) -> NoReturn:
    """Raise NotBuiltError for a name of DeepSpeed.

    Args:
        name: the name, as the user writes it.
        remedy: what to write instead.
    """
    raise NotBuiltError(f"{name} of DeepSpeed is not built here: {remedy}")


class NotBuilt:
    """The base of classes in place of DeepSpeed's classes. No object can be made of them or of their subclasses.

    class PipelineModule(NotBuilt, remedy="use data parallelism"): ...
    """

    _refused: ClassVar[tuple[str, str]]

    def __init_subclass__(cls, *, remedy: str | None = None) -> None:
        # A user's subclass passes no remedy and gets none of its own. So its error names the class of DeepSpeed that it
        # derives from, which DeepSpeed's documentation explains.
        if remedy is not None:
            cls._refused = (cls.__name__, remedy)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        refuse(*cls._refused)
