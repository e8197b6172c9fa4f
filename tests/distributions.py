"""Installs the wheel and the source distribution in clean environments, and runs the README's loop from the wheel.

`make dist` runs it. This program owns two environments in a temporary directory. It must never use the checkout's code
but for what it compares with.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from paramserver import __version__
from paramserver.build import read_build, read_commit

ROOT = Path(__file__).parents[1]
COMMANDS = ("paramserver", "paramserver-admin")


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command, and return what it prints. End the program if it fails."""
    ended = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, words))} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def install(archive: Path, directory: Path) -> Path:
    """Install an archive in a new environment with the locked versions of what it needs.

    Return the directory of the environment's commands.
    """
    binaries = directory / archive.name / "bin"
    run(sys.executable, "-m", "venv", binaries.parent, cwd=directory)
    pip = (binaries / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--constraint", ROOT / "requirements.lock", archive, cwd=directory)
    run(*pip, "check", cwd=directory)
    return binaries


def check(archive: Path, directory: Path) -> Path:
    """Install an archive, and check that its commands name this checkout's commit and code. Return its commands."""
    binaries = install(archive, directory)
    for command in COMMANDS:
        shown = run(binaries / command, "--version", cwd=directory).strip()
        expected = f"{command} {__version__}, commit {read_commit()}, build {read_build()}"
        if shown != expected:
            sys.exit(f"{archive.name}: `{command} --version` prints\n  {shown}\nin place of\n  {expected}")
        run(binaries / command, "--help", cwd=directory)
    for verb in ("export", "import", "launch", "plan"):
        run(binaries / "paramserver", verb, "--help", cwd=directory)
    return binaries


def main() -> None:
    """Check the archives of a directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="directory with one wheel and one source distribution")
    directory = parser.parse_args().directory.resolve()
    (wheel,), (source,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    with tempfile.TemporaryDirectory(prefix="paramserver-dist-") as name:
        place = Path(name)
        check(source, place)
        binaries = check(wheel, place)
        (place / "loop.py").write_text(example, encoding="utf-8")
        print(run(binaries / "python", "loop.py", cwd=place), end="")
    print(f"{wheel.name} and {source.name} are of commit {read_commit()}, build {read_build()}")


if __name__ == "__main__":
    main()
