"""Counts the executed lines of the project's code, so that a test can compare the work for N and for 4 N things.

Only lines of storage and paramserver on the calling thread count, so the number is the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[3]
COUNTED = (f"{ROOT / 'storage'}/", f"{ROOT / 'paramserver'}/")


@dataclass(slots=True)
class Work:
    """The number of lines that were executed."""

    lines: int = 0


@contextmanager
def counted() -> Iterator[Work]:
    """Count the lines that are executed inside, also by other tasks of this thread's event loop."""
    work = Work()

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            work.lines += 1
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(COUNTED) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield work
    finally:
        sys.settrace(before)
