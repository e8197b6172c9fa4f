"""The files of another commit of this repository, beside this one's."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.machine import ROOT
from benchmarks.common.measure import BenchmarkError


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Yield a directory with the files of a commit, which is removed at the end. It can raise BenchmarkError."""
    with tempfile.TemporaryDirectory(prefix="commit-") as directory:
        tree = Path(directory) / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"git {arguments[0]} failed: {done.stderr.strip()}")
