"""The part of the build of a wheel that writes stubs of DeepSpeed's names into the package.

Type checkers and editors read them, because they cannot see the modules that finder.py makes. setuptools loads this
file by itself, as pyproject.toml says, where torch is not installed. It must import nothing of the project.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools.command.build_py import build_py


class BuildWithStubs(build_py):
    """Builds the packages, and writes the stubs beside them. An editable install has none."""

    def run(self) -> None:
        """Build the packages."""
        super().run()
        if not self.editable_mode:
            runpy.run_path(str(Path(__file__).with_name("names.py")))["write_stubs"](Path(self.build_lib))
