"""The results in RESULTS.md and results/: one section and one JSON file per benchmark, which `--results` replaces."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from benchmarks.common import machine
from benchmarks.common.measure import BenchmarkError

HERE = Path(__file__).parents[1]
INTRODUCTION = """# Results

Measured by `make bench-storage`, `bench-dataplane`, `bench-step`, `bench-scale`, `bench-depth`, `bench-activations`,
`bench-costs`, `bench-gpu`, `bench-overlap`, `bench-remote` and `bench-beside`, which replace their
sections. All samples are in `results/`. Ratios compare runs that took turns; the rates themselves are of one machine on
one day. Benchmarks that have answered their question are on [a page of their own](../docs/measured-2026-11.md).
"""


def run(
    name: str,
    title: str,
    target: str,
    measure: Callable[[], dict[str, Any] | Iterator[dict[str, Any]]],
    markdown: Callable[[dict[str, Any]], str],
    *,
    directory: Path,
    as_json: bool,
    results: bool,
    arguments: str = "",
    errors: tuple[type[Exception], ...] = (),
) -> dict[str, Any]:
    """Measure, print the result and return it; for `name` and `title` see `store`.

    Args:
        target: make's target that runs this benchmark.
        measure: returns the figures, to which the machine and the provenance are added. A benchmark of many parts may
            yield the figures so far after each part: they are kept at once, in case a later part fails.
        markdown: returns the section's body for a result.
        directory: the folder on whose file system `measure` works; it is made if it does not exist.
        as_json: whether the result is printed as a JSON object, and not as the section's body.
        results: whether the result is kept, too.
        arguments: what has to follow `target` in the command that makes the result anew.
        errors: what `measure` raises besides BenchmarkError and OSError if the benchmark cannot go on.

    Raises:
        typer.Exit: `measure` failed, and its error was printed.
    """
    failures: tuple[type[Exception], ...] = (BenchmarkError, OSError, *errors)
    # A benchmark that gets this signal leaves its contexts, which remove its files, processes and control groups.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result: dict[str, Any] = {}
    body = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        measured = measure()
        for figures in [measured] if isinstance(measured, dict) else measured:
            result = {"machine": machine.describe(directory), "provenance": machine.provenance(), **figures}
            body = markdown(result)
            if results:
                store(name, title, result, body, f"make {target} {arguments}".strip())
    except failures as error:
        typer.echo(f"{target}: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(result, indent=1) if as_json else body)
    return result


def store(name: str, title: str, result: dict[str, Any], body: str, repeat: str, directory: Path = HERE) -> None:
    """Write `result` to results/NAME.json, and replace its section of RESULTS.md by `body` under `title`.

    `repeat` is the command that makes the result anew.
    """
    (directory / "results").mkdir(exist_ok=True)
    (directory / "results" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n## {title}\n\n{_origin(result)}\n\n{body.strip()}\n\nRepeat with `{repeat}`.\n{end}\n"
    path = directory / "RESULTS.md"
    text = path.read_text() if path.exists() else INTRODUCTION
    known = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}\n", re.DOTALL)
    # The replacement is a function, because `subn` would interpret backslashes in a string.
    text, found = known.subn(lambda _: section, text)
    path.write_text(text if found else f"{text.rstrip()}\n\n{section}")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table whose columns are right-aligned except the first; None is shown as "-"."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join('-' if cell is None else str(cell) for cell in line)} |" for line in lines)


def _origin(result: dict[str, Any]) -> str:
    machine, made = result["machine"], result["provenance"]
    return (
        f"{made['date']}, commit {made['git_commit'] or 'unknown'}. {machine['cpu']}, {machine['cpu_count']} CPUs, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory, Linux {machine['kernel']}, {machine['file_system']} on "
        f"{machine['device']}; Python {made['python']}, torch {made['torch']}"
        + (f", {result['fio_version']}." if result.get("fio_version") else ".")
    )
