"""The version of DeepSpeed whose names this package follows, as scripts ask for it.

The version of this project is `paramserver.__version__`.
"""

from __future__ import annotations

import logging

__all__ = [
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
]

__version_major__, __version_minor__, __version_patch__ = 0, 19, 6
# The part after the plus sign says that this library stands in for DeepSpeed. Comparisons with a release number ignore
# that part.
__version__ = f"{__version_major__}.{__version_minor__}.{__version_patch__}+paramserver"
# This package was not built in DeepSpeed's repository, so it has no git commit of DeepSpeed. DeepSpeed itself writes
# "[none]" in that case.
__git_hash__ = __git_branch__ = "[none]"


def log_version() -> None:
    """Log the line about its version that DeepSpeed logs, because tests look for it to see that `deepspeed` is used."""
    logging.getLogger("DeepSpeed").info(
        "DeepSpeed info: version=%s, git-hash=%s, git-branch=%s", __version__, __git_hash__, __git_branch__
    )
