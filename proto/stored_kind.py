"""The generator of paramserver/contract/stored_kind.py: `python -m proto.stored_kind`, which `make proto` runs."""

from __future__ import annotations

from pathlib import Path

from paramserver.contract.words import words_of
from paramserver.v1 import parameter_store_pb2 as pb

FILE = Path(__file__).parents[1] / "paramserver/contract/stored_kind.py"


def text() -> str:
    """Return the text of the file."""
    words = "".join(f'    "{word}",\n' for word, kind in words_of(pb.Kind).items() if kind != pb.KIND_GRAD)
    return f'''"""The words of the kinds that a job stores. `make proto` makes this file; do not edit it."""

from __future__ import annotations

from typing import Literal

# The names of the kinds that a job stores from step to step. Gradients are left out, because a step uses them up.
StoredKind = Literal[
{words}]
'''


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
