"""The demo's output for people: the progress line while it runs, and the loss curve."""

from __future__ import annotations

import plotext  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo_support.journal import Journal
from demo_support.verdict import Verdict

PLOT_COLUMNS = 90
PLOT_ROWS = 20
RATE_STEPS = 5
LINE_EVERY_STEPS = 10


class ProgressLine:
    """A context with a progress line of phase, steps, loss and speed.

    If there is no terminal, it prints a line every LINE_EVERY_STEPS steps.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._shown_step = 0
        self._progress = Progress(
            TextColumn("[bold]{task.fields[phase]:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps · {task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=steps, phase="", figures="")

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def phase(self, phase: str) -> None:
        self._progress.update(self._task, phase=phase)

    def say(self, text: str) -> None:
        """Print a line that stays above the progress line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, journal: Journal) -> None:
        """Show the journal's newest step in the line."""
        step = journal.newest_step
        if step in (0, self._shown_step):
            return
        self._shown_step = step
        tokens, seconds = journal.tokens_and_seconds(RATE_STEPS)
        figures = f"loss {journal.mean_loss(step):.3f} · {tokens / seconds if seconds else 0.0:,.0f} tokens/s"
        self._progress.update(self._task, completed=step, figures=figures)
        if not self._console.is_terminal and step % LINE_EVERY_STEPS == 0:
            self.say(f"step {step} of {self._steps} · {figures}")


def print_loss_curve(console: Console, verdict: Verdict, byte_entropy: float) -> None:
    """Print a plot of the mean loss by step."""
    figure = plotext.figure
    figure.plot_size(min(console.width, PLOT_COLUMNS), PLOT_ROWS)
    steps, losses = list(verdict.losses), list(verdict.losses.values())
    figure.title("loss (nats per byte) by step")
    curve = figure.signal(steps, losses, marker="braille").lines()
    figure.draw(curve.label("mean of the ranks"))
    figure.line(verdict.killed_at, "vertical", label=f"SIGKILL at step {verdict.killed_at}")
    figure.line(byte_entropy, "horizontal", label=f"byte frequencies alone: {byte_entropy:.2f}")
    figure.legend(x=steps[-1], y=max(losses), ha="right", va="top", relative=True)
    # The plot has no colours, because plotext's colours set a background that suits few terminals.
    figure.show(colorless=True, flush=True)
