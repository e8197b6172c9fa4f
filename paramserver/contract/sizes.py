"""Sizes as users write them: a number of bytes, or a number with a unit such as "1.5GiB"."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize
from pydantic_core import PydanticCustomError

_SIZE = re.compile(r"\s*[0-9_]*\.?[0-9_]+\s*[A-Za-z]*\s*")


def _check_whole(value: Any) -> Any:
    """Return a value as it is. Raise an error for a text of which pydantic would read the beginning only.

    Without this, pydantic would take "1,5GiB" for 1 byte, and true, too.
    """
    if isinstance(value, bool) or (isinstance(value, str) and _SIZE.fullmatch(value) is None):
        raise PydanticCustomError("size", 'write a number of bytes, or a number with a unit, such as "1.5GiB"')
    return value


# The type of a key whose value is a size. A default is a plain ByteSize.
Size = Annotated[ByteSize, BeforeValidator(_check_whole)]
