"""The error that ends the demo, and the end of a child process's log for its message."""

from __future__ import annotations

from pathlib import Path

_TAIL_LINES = 40


class DemoError(Exception):
    """The demo failed; the message is for the person who started it."""


def log_tail(path: Path) -> str:
    """Return the last lines of a log, or the reason why it cannot be read."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(lines[-_TAIL_LINES:])
