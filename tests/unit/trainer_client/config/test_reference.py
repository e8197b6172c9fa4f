"""The tables of docs/config.md are those of the typed config, and each key stands in one of them."""

from __future__ import annotations

import re

from trainer_client.config.keys import leaves
from trainer_client.config.reference import PAGE, entries, generated_parts, main, render
from trainer_client.config.training_config import TrainingConfig

PARTS = ["count", "honoured", "without_effect", "refused", "older_names"]


def test_the_page_is_up_to_date() -> None:
    assert main(["--check"]) == 0, "run python -m trainer_client.config.reference"


def test_the_page_has_each_part_once_and_the_text_around_them_stays() -> None:
    page = PAGE.read_text()

    assert re.findall(r"<!-- generated: (\w+) -->", page) == PARTS == list(generated_parts())
    emptied = re.sub(r"(<!-- generated: \w+ -->).*?(<!-- end -->)", r"\1\n\2", page, flags=re.DOTALL)
    assert render(emptied) == page


def test_each_key_is_in_a_table() -> None:
    listed = [f"{entry.path}.{key}" if key else entry.path for entry in entries() for key in entry.inner or ("",)]

    assert set(listed) == {path for path, _ in leaves(TrainingConfig)}
