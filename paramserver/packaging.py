"""What the building of the packages adds to them: the commit that they are built from, and stubs of DeepSpeed's names.

Type checkers and editors read the stubs, because they cannot see the modules that trainer_client/deepspeed/finder.py
makes. setuptools loads this file by itself, as pyproject.toml says, also where torch is not installed. So this file
must import nothing of the project.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

_ROOT = Path(__file__).parents[1]


def _write_commit(target: Path) -> None:
    """Write the file that names the commit below `target`, unless the commit is not known.

    The commit is the checkout's, or that of the source distribution from which a wheel is built. paramserver/build.py
    finds it in the same way for `--version`.
    """
    commit = runpy.run_path(str(_ROOT / "paramserver/build.py"))["read_commit"]()
    if commit != "unknown":
        (target / "paramserver" / "commit.txt").write_text(commit, encoding="ascii")


class BuildPackages(build_py):
    """Builds the packages, and adds the commit and the stubs to the built copy. An editable install gets neither."""

    def run(self) -> None:
        """Build the packages."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib)
            runpy.run_path(str(_ROOT / "trainer_client/deepspeed/names.py"))["write_stubs"](target)
            _write_commit(target)


class SourceDistribution(sdist):
    """Makes a source distribution with a file that names its commit, because an unpacked one has no checkout."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Make the directory that is packed."""
        super().make_release_tree(base_dir, files)
        _write_commit(Path(base_dir))
