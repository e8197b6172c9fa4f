"""A size is read as a whole, or refused: a part of it would be another size. All texts show sizes alike."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress

from paramserver.contract.progress_bars import RateColumn, byte_bars
from paramserver.contract.sizes import Size, least_size, shown_size
from storage.base import shown_sizes
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError

READER = TypeAdapter(Size)
ROOT = Path(__file__).parents[4]
# The ends of texts that the size of a budget or quota follows, and units of powers of 1000, which rates have.
_BEFORE_A_SIZE = re.compile(r"(_budget|_budget is|_budget:|(host|nvme)_bytes =|at least) $")
_DECIMAL_UNIT = re.compile(r"(?<!for each) [kMGT]B\b(?!/s)")


@pytest.mark.parametrize(
    ("written", "expected"),
    [(5, 5), ("7", 7), ("1_000", 1000), (" 1.5 GiB ", 3 << 29), (".5kb", 500), ("2g", 2 * 10**9), ("64MiB", 64 << 20)],
)
def test_sizes_are_numbers_with_or_without_a_unit(written: Any, expected: int) -> None:
    assert READER.validate_python(written) == expected


@pytest.mark.parametrize(
    "written", ["1,5GiB", "1,000,000", "1.2.3MiB", "100%", "5GiB/s", "64 GiB 1", "-1", "", "GiB", True]
)
def test_what_is_no_size_as_a_whole_is_refused(written: Any) -> None:
    with pytest.raises(
        ValidationError, match=r"write a number of bytes, or a number with one of the units KiB, MiB, GiB, TiB"
    ):
        READER.validate_python(written)


@pytest.mark.parametrize("key", ["gpu_budget", "kept_gradients"])
def test_a_key_of_the_training_config_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"paramserver.{key} = '1,5GiB' is refused: write a number of bytes"):
        load_config({"paramserver": {key: "1,5GiB"}}, {})


@pytest.mark.parametrize(
    ("nbytes", "shown", "least"),
    [
        (0, "0 B", "0MiB"),
        (512, "512 B", "1MiB"),
        (36_294_656, "34.6 MiB", "35MiB"),
        (1 << 30, "1.0 GiB", "1024MiB"),
        ((1 << 30) + 1, "1.0 GiB", "1025MiB"),
        (107_374_182_400, "100.0 GiB", "102400MiB"),
    ],
)
def test_a_size_is_shown_in_binary_units_and_one_to_set_has_room(nbytes: int, shown: str, least: str) -> None:
    assert (shown_size(nbytes), least_size(nbytes)) == (shown, least)
    assert (shown_sizes.shown_size(nbytes), shown_sizes.least_size(nbytes)) == (shown, least)
    assert READER.validate_python(least) >= nbytes


def _texts(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each text of an f-string with the expression that follows it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for text, value in zip(node.values, [*node.values[1:], None], strict=True):
                if isinstance(text, ast.Constant):
                    yield str(text.value), "" if value is None else ast.unparse(value)


@pytest.mark.parametrize("package", ["storage", "paramserver", "trainer_client"])
def test_no_text_for_people_has_raw_bytes_of_a_budget_or_units_of_1000(package: str) -> None:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for text, value in _texts(ast.parse(path.read_text())):
            is_raw = _BEFORE_A_SIZE.search(text) and "bytes" in value and "_size(" not in value
            if is_raw or _DECIMAL_UNIT.search(text):
                found.append(f"{path.relative_to(ROOT)}: {text!r} {value}")
    assert found == []


def test_a_progress_bar_has_binary_units() -> None:
    output = StringIO()
    terminal = Console(file=output, force_terminal=True, width=100)
    with byte_bars(terminal, is_transient=False) as show:
        show("copy", 1 << 20, 3 << 20)
    assert "copy" in output.getvalue() and "1.0/3.0 MiB" in output.getvalue()

    bars = Progress(rate := RateColumn())
    task = bars.add_task("", total=3 << 20)
    assert str(rate.render(bars.tasks[task])) == ""
    bars.tasks[task].finished_speed = 1.5 * (1 << 20)
    assert str(rate.render(bars.tasks[task])) == "1.5 MiB/s"


def test_no_progress_bar_is_drawn_where_no_person_reads() -> None:
    output = StringIO()
    with byte_bars(Console(file=output)) as show:
        show("copy", 1, 2)
    assert output.getvalue().strip() == ""
