"""What ends the demo."""

from __future__ import annotations

from pathlib import Path

_TAIL_LINES = 40


class DemoError(Exception):
    """The demo failed; the message is for the person who started it."""


def log_tail(path: Path) -> str:
    """The last lines of a log, or why there are none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(lines[-_TAIL_LINES:])
