"""Sizes as users write them, "1.5GiB" or a number of bytes, and as all texts show them, "1.5 GiB".

Texts for people have binary units everywhere: errors, the log, `paramserver-admin`, `paramserver plan`, the page. JSON
has bytes. `storage/base/shown_sizes.py` has the same two functions, because that package imports no other.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize
from pydantic_core import PydanticCustomError

_SIZE = re.compile(r"\s*[0-9_]*\.?[0-9_]+\s*([A-Za-z]*)\s*")


def _check_whole(value: Any) -> Any:
    """Return a value as it is. Raise an error for a text of which pydantic would read the beginning only.

    Without this, pydantic would take "1,5GiB" for 1 byte, and true, too. An unknown unit is refused here, because
    pydantic's own error does not say which units there are.
    """
    if isinstance(value, bool) or (isinstance(value, str) and not _is_size(value)):
        raise PydanticCustomError(
            "size",
            "write a number of bytes, or a number with one of the units KiB, MiB, GiB, TiB, PiB (powers of 1024) and "
            'KB, MB, GB, TB, PB (powers of 1000), such as "1.5GiB"',
        )
    return value


def _is_size(text: str) -> bool:
    found = _SIZE.fullmatch(text)
    return found is not None and (found[1].lower() or "b") in ByteSize.byte_sizes


# The type of a configuration key whose value is a number of bytes. The default of such a key is a plain ByteSize.
Size = Annotated[ByteSize, BeforeValidator(_check_whole)]


def shown_size(nbytes: float) -> str:
    """Return a number of bytes for people, rounded to a tenth of a binary unit: "34.6 MiB"."""
    return ByteSize(nbytes).human_readable(separator=" ")


def least_size(nbytes: int) -> str:
    """Return the smallest size of whole MiB that has room for `nbytes`, as a config writes it: "35MiB"."""
    return f"{-(-nbytes >> 20)}MiB"
