"""The page for users of Accelerate lists names that there are, and all arguments of `Accelerator`."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest

import trainer_client
from tests.unit.trainer_client.pages import words_by_name
from trainer_client.accelerate.options import Options
from trainer_client.errors import ConfigError

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/accelerate.md").read_text(encoding="utf-8")
LISTED = words_by_name(PAGE)
CONSTRUCTOR = re.compile(r"Accelerator\((\w+)=\)")


def test_the_page_lists_every_argument_of_the_constructor() -> None:
    arguments = {match[1] for name in LISTED if (match := CONSTRUCTOR.fullmatch(name))}

    assert arguments == {*inspect.signature(accelerate.Accelerator.__init__).parameters, "config"} - {"self"}
    assert set(LISTED.values()) == {"honoured", "without effect", "refused"}


@pytest.mark.parametrize("name", [name for name in LISTED if not CONSTRUCTOR.fullmatch(name)])
def test_every_name_of_the_page_is_there(name: str) -> None:
    assert hasattr(trainer_client.Accelerator, name)


@pytest.mark.parametrize("name", [name for name, word in LISTED.items() if word == "refused" and "(" in name])
def test_a_refused_argument_says_what_to_write(name: str) -> None:
    match = CONSTRUCTOR.fullmatch(name)
    assert match is not None
    with pytest.raises(ConfigError, match=f"{match[1]}.*zero_optimization"):
        Options.of((), {match[1]: object()}, None, {})


def test_what_accelerate_overrides_here_is_listed() -> None:
    own = {name for name, value in vars(trainer_client.Accelerator).items() if not name.startswith("_") and value}

    assert own - LISTED.keys() == set()


def test_the_library_works_without_accelerate() -> None:
    """Only the use of `Accelerator` imports the package, and its absence is an error that says how to install it."""
    program = (
        "import sys; sys.modules['accelerate'] = None\n"
        "import trainer_client\n"
        "try: trainer_client.Accelerator\n"
        "except ImportError as error: print(error)\n"
        "assert not hasattr(trainer_client, 'no_such_name')"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert "pip install 'paramserver[accelerate]'" in ended.stdout
