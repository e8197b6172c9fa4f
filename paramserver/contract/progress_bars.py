"""The columns of progress bars that count bytes, in the units of all other texts, where rich has powers of 1000."""

from __future__ import annotations

from rich.progress import DownloadColumn, ProgressColumn, Task
from rich.text import Text

from paramserver.contract.sizes import shown_size


def byte_columns() -> tuple[ProgressColumn, ProgressColumn]:
    """Return the columns with the bytes that are done, of all, and with the bytes in a second."""
    return DownloadColumn(binary_units=True), _RateColumn()


class _RateColumn(ProgressColumn):
    """The bytes in a second, once they are known."""

    def render(self, task: Task) -> Text:
        """Return the text of a task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{shown_size(speed)}/s", style="progress.data.speed")
