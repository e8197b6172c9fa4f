"""Progress bars that count bytes in binary units, as all texts of this project do; rich uses powers of 1000."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from paramserver.contract.sizes import shown_size

ShowBytes = Callable[[str, int, int], None]
"""Draws the bar of a name anew: the name, the bytes that are done, and all bytes."""


@contextlib.contextmanager
def byte_bars(
    console: Console | None = None, *, is_shown: bool = True, is_transient: bool = True
) -> Iterator[ShowBytes]:
    """Show a bar for each name, until the context ends. A name's first call adds its bar.

    Args:
        console: the terminal; standard error by default. Nothing is shown if the console is not a terminal.
        is_shown: whether to show bars at all.
        is_transient: whether the bars disappear when the context ends.
    """
    console = console or Console(stderr=True)
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(binary_units=True), RateColumn(), TimeRemainingColumn())
    is_shown = is_shown and console.is_terminal
    with Progress(*columns, console=console, transient=is_transient, disable=not is_shown) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done_bytes: int, total_bytes: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total_bytes)
            bars.update(tasks[name], completed=done_bytes, total=total_bytes)

        yield show


class RateColumn(ProgressColumn):
    """A column of the progress bar that shows the bytes per second; it is empty until the speed is known."""

    def render(self, task: Task) -> Text:
        """Return the text of a task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{shown_size(speed)}/s", style="progress.data.speed")
