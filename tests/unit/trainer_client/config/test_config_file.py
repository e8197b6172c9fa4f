"""A config file may have what DeepSpeed's reader accepts, and no string in it is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_client.config.config_file import read_config_file
from trainer_client.errors import ConfigError


def test_comments_and_trailing_commas_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
        // one line
        "a": "http://x/#y, }", # another
        /* several
           lines */ "b": [1, 2,],
        "c": {"d": "\\"//,]"},
    }"""
    )

    assert read_config_file(path) == {"a": "http://x/#y, }", "b": [1, 2], "c": {"d": '"//,]'}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list: write a JSON object"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ('{\n\n"a": ?}', "line 3"),
    ],
)
def test_what_is_no_config_is_refused_with_its_path(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=words) as caught:
        read_config_file(path)

    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config_file(tmp_path / "none.json")


def test_numbers_beyond_json_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": 1e999, "other": Infinity}')

    assert read_config_file(path) == {"steps_per_print": float("inf"), "other": float("inf")}


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes('{"paramserver": {"job": "Modell für alle"}}'.encode("latin-1"))

    with pytest.raises(ConfigError, match=rf"config {path} is not text in UTF-8: "):
        read_config_file(path)
