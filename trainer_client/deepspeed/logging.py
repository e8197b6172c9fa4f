"""The logger "DeepSpeed", to which scripts for DeepSpeed write, and functions that write on some ranks only.

The logger has no handler of its own, so the script's configuration of Python's logging decides what is shown. (In
DeepSpeed, this logger writes warnings to stdout.) The library's own lines go to the loggers of its modules,
`trainer_client.*`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from trainer_client import comm

__all__ = [
    "get_current_level",
    "log_dist",
    "log_dist_once",
    "logger",
    "print_dist",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]

logger = logging.getLogger("DeepSpeed")

_ALL_RANKS = -1


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Write a line to the logger on some ranks, or on all ranks if there is no process group yet.

    Args:
        ranks: the ranks that write the line; [-1]: all ranks write it; None: no rank does.
    """
    if (line := _line(message, ranks)) is not None:
        logger.log(level, line)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print a line on some ranks, chosen as in `log_dist`."""
    if (line := _line(message, ranks)) is not None:
        print(line)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Write a line as `log_dist` does, but only at the first call with the same arguments."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(message: str) -> None:
    """Write a warning to the logger, but only at the first call with the same message."""
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger and of its handlers.

    Args:
        log_level_str: "debug", "info", "warning", "error" or "critical".
        custom_logger: the logger; None: the logger "DeepSpeed".

    Raises:
        ValueError: there is no such level.
    """
    chosen = logger if custom_logger is None else custom_logger
    level = _level(log_level_str)
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the level of the logger "DeepSpeed", as a number of Python's logging."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return whether the logger's level is at most `max_log_level_str`. Raise ValueError for an unknown level."""
    return get_current_level() <= _level(max_log_level_str)


def _level(name: str) -> int:
    levels = {word: getattr(logging, word.upper()) for word in ("debug", "info", "warning", "error", "critical")}
    if name.lower() not in levels:
        raise ValueError(f"log level {name!r}: write one of {', '.join(levels)}")
    level: int = levels[name.lower()]
    return level


def _line(message: str, ranks: Sequence[int] | None) -> str | None:
    """Return the line for the log, which is the message after the rank; None if this rank is not in `ranks`."""
    if not comm.is_initialized():
        return f"[Rank -1] {message}"
    rank = comm.get_rank()
    chosen = ranks or []
    return f"[Rank {rank}] {message}" if rank in chosen or _ALL_RANKS in chosen[:1] else None
