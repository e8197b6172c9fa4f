"""The tutorials work: their files and commands, in the order of the page and in an empty directory, print what they say
there.

A block of code after `<!-- file: NAME -->` is a file, and one for the shell is run unless it stands after
`<!-- not run -->`. Each line of a block of text is printed by the commands so far, with other numbers and paths.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
# Enough for a machine with other load: alone, the longest tutorial takes less than 20 s.
MOST_SECONDS = 500.0

_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


class Tutorial:
    """A page that is followed in a directory of its own."""

    def __init__(self, page: Path, directory: Path) -> None:
        directory.mkdir()
        self.promised: list[str] = []
        commands = []
        for note, language, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if note.startswith("file: "):
                (directory / note.removeprefix("file: ")).write_text(body, encoding="utf-8")
            elif language == "sh" and note != "not run":
                commands.append(body)
            elif language == "text":
                self.promised += body.splitlines()
        assert commands, page
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "PARAMSERVER_ADDRESS")}
        paths = [str(ROOT), environment.get("PYTHONPATH", "")]
        # The commands are in a session of their own, so that no daemon outlives a tutorial that fails.
        self._process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", "".join(commands)],
            cwd=directory,
            env=environment
            | {
                "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "160",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str]:
        """Wait until the commands have ended. Return their exit status and what they printed."""
        printed, _ = self._process.communicate(timeout=MOST_SECONDS)
        return self._process.returncode, printed

    def kill(self) -> None:
        """End all processes of the tutorial that are still there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def shape(line: str) -> str:
    """Return a line without what differs from run to run: numbers, their units of time, paths and spaces."""
    line = re.sub(r"(unix:)?/[^\s.]*(\.sock)?", "PATH", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,e+-]*( (s|min))?\b", "N", line)).strip()


def losses_in(text: str) -> list[float]:
    """Return the losses of the lines about steps."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", text, flags=re.MULTILINE)]


def test_each_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    followed = {page.stem: Tutorial(page, tmp_path / page.stem) for page in TUTORIALS}
    try:
        ended = {name: tutorial.finish() for name, tutorial in followed.items()}
    finally:
        for tutorial in followed.values():
            tutorial.kill()

    assert {name: output for name, (status, output) in ended.items() if status != 0} == {}
    for name, (_, output) in ended.items():
        shapes = {shape(line) for line in output.splitlines()}
        missing = [line for line in followed[name].promised if shape(line) not in shapes]
        assert missing == [], f"{name} did not print these lines, but:\n{output}"
    # The seed of this tutorial makes its losses. Other processors round otherwise.
    promised = losses_in("\n".join(followed["seven-billion"].promised))
    printed = losses_in(ended["seven-billion"][1])
    assert printed == pytest.approx(promised, abs=0.02) and promised == sorted(promised, reverse=True)


def test_the_shape_of_a_line_has_no_numbers_and_paths() -> None:
    line = "weights: step 12 of first, 914.5 KiB, 4 s ago, in the store at unix:/tmp/a/paramserver.sock. lr 1.00e-02"
    assert shape(line) == shape(line.replace("12", "7").replace("/tmp/a", "/b").replace("4 s", "1 min"))
    assert shape(line) != shape(line.replace("first", "second"))
