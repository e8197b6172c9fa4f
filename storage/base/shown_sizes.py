"""Numbers of bytes as the texts of this package show them.

`paramserver/contract/sizes.py` has the same two functions for the other packages, which clients import without this
package; `tests/unit/paramserver/contract/test_sizes.py` compares them.
"""

from __future__ import annotations

from pydantic import ByteSize


def shown_size(nbytes: float) -> str:
    """Return a number of bytes for people, rounded to a tenth of a binary unit: "34.6 MiB"."""
    return ByteSize(nbytes).human_readable(separator=" ")


def least_size(nbytes: int) -> str:
    """Return the smallest size of whole MiB that has room for `nbytes`, as a config writes it: "35MiB"."""
    return f"{-(-nbytes >> 20)}MiB"
