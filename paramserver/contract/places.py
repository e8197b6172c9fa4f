"""The paths at which a daemon makes files and directories, as users write them in configurations and options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def check_place(path: Path) -> Path:
    """Check a path of a configuration or an option, and return it unchanged.

    Raises:
        ValueError: the path begins with ~. Only a shell replaces that, and bash does not in `--state-dir=~/store`, so a
            directory named ~ would be made in the working directory.
    """
    if path.parts and path.parts[0].startswith("~"):
        text = "only a shell replaces ~ by a home directory, and not behind =: write the path in full"
        raise PydanticCustomError("place", text)
    return path


# The type of a configuration key whose value is a path that `check_place` accepts.
Place = Annotated[Path, AfterValidator(check_place)]
