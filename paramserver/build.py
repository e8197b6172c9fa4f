"""The build of this installation: a digest of the project's code, as it lies on the disk.

Two installations have one build if and only if they have the same code, whether they are wheels, source distributions,
images or editable source trees with changes of one's own. A number that is made at packaging would say nothing about
the last kind. This module must never import another module of the project, because both commands import this one to
show the build.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("paramserver", "storage", "trainer_client")
# The suffixes of the installed files that the digest of a build covers: code, the parts of the status page, and tables
# of config keys.
_SUFFIXES = frozenset({".py", ".html", ".css", ".js", ".toml"})
_DIGEST_BYTES = 6


def read_commit(root: Path = _ROOT) -> str:
    """Return the commit that the packages in `root` were taken from, or "unknown". Later changes are not counted.

    A wheel and a source distribution carry the commit in a file. In a checkout, git is asked for it.
    """
    if (carried := root / "paramserver" / "commit.txt").is_file():
        return carried.read_text(encoding="ascii").strip()
    # If `root` has no .git, git is not asked. The packages may lie inside a checkout of another project, and that
    # project's commit would say nothing about them.
    if not (root / ".git").exists():
        return "unknown"
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read_build(root: Path = _ROOT) -> str:
    """Return the build of the packages in `root` in 12 hexadecimal digits. It takes some 50 ms.

    A process keeps the build that it has read at its start, because the code on the disk may change later.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*")):
        if path.suffix in _SUFFIXES:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()
