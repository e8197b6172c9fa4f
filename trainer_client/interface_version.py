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
# The part after the plus sign says which library it is. It does not take part in a comparison with a release.
__version__ = f"{__version_major__}.{__version_minor__}.{__version_patch__}+paramserver"
# A package that was not built in DeepSpeed's repository has no commit of it. DeepSpeed writes the same text then.
__git_hash__ = __git_branch__ = "[none]"


def log_version() -> None:
    """Log DeepSpeed's line about its version, in which people and tests see that `deepspeed` was used."""
    logging.getLogger("DeepSpeed").info(
        "DeepSpeed info: version=%s, git-hash=%s, git-branch=%s", __version__, __git_hash__, __git_branch__
    )
