"""UNIX sockets at paths of any length and with any characters, for the daemon that listens and for its clients.

The kernel takes at most 107 bytes as a socket's path (sun_path in man 7 unix). A longer path is reached through an open
descriptor of its directory, as /proc/self/fd/N/NAME. So the socket needs no second name in a directory that other users
can write to, and no file has to be removed after a crash. This module owns these descriptors.

[Note: descriptors stay open] gRPC connects on threads of its own, and again whenever a connection breaks. So a
descriptor must live at least as long as the last channel that uses it. gRPC also shares connections between channels of
equal addresses. So the number of a descriptor must never be reused for another directory. Therefore one descriptor for
each directory of a long path stays open until the process ends. A forked child inherits the descriptors and the table.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

# The most bytes of a socket's path in the kernel: the size of sun_path without the zero byte that ends the path.
_MAX_PATH_BYTES = 107
_DESCRIPTORS = "/proc/self/fd"
# The most bytes of a socket's name if its directory's path is long. The socket is then reached at /proc/self/fd/N/NAME,
# where N is a descriptor of the directory, and this many bytes remain for NAME if N has the most digits.
MAX_NAME_BYTES = _MAX_PATH_BYTES - len(f"{_DESCRIPTORS}/{(1 << 31) - 1}/")

_descriptors: dict[str, int] = {}


def check_path(path: Path) -> None:
    """Check that a socket can be at `path`, whether or not there is one.

    Raises:
        ValueError: the message says what is wrong with the path.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"the socket's path {str(path)!r} is not UTF-8: choose another directory") from None
    name = len(os.fsencode(path.name))
    if len(os.fsencode(path)) > _MAX_PATH_BYTES and name > MAX_NAME_BYTES:
        raise ValueError(
            f"the socket's path {path} is longer than {_MAX_PATH_BYTES} bytes, and then its last part may have "
            f"{MAX_NAME_BYTES} bytes, not {name}: choose a shorter name"
        )


def system_path(path: Path) -> str:
    """Return the path by which this process binds or connects the socket at the absolute `path`.

    Raises:
        OSError: the path is long, and its directory does not exist or cannot be entered.
    """
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        return str(path)
    return f"{_DESCRIPTORS}/{_descriptor_of(str(path.parent))}/{path.name}"


def grpc_target(path: Path) -> str:
    """Return the socket at the absolute `path` in the form that a gRPC server or channel of this process takes.

    gRPC reads this form as a URI, so the path is quoted: otherwise `%`, `?` and `#` in it would have a special meaning.

    Raises:
        OSError: see `system_path`.
    """
    return f"unix:{quote(os.fsencode(system_path(path)))}"


def with_real_paths(text: str) -> str:
    """Return an error message of gRPC in which each path like /proc/self/fd/N is replaced by its real directory."""
    directories = {number: directory for directory, number in _descriptors.items()}
    return re.sub(rf"{_DESCRIPTORS}/(\d+)(?=/)", lambda found: directories.get(int(found[1]), found[0]), text)


def _descriptor_of(directory: str) -> int:
    """Return a descriptor of the directory that has this path now, the same one at each call.

    The descriptor stays open until the process ends; see [Note: descriptors stay open].
    """
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    known = _descriptors.get(directory)
    if known is not None and _is_same(known, opened):
        os.close(opened)
        return known
    # No descriptor is stored for the path of this directory, or the stored one is of another directory that had the
    # path before. So the new descriptor is stored. The former one stays open; see [Note: descriptors stay open].
    _descriptors[directory] = opened
    return opened


def _is_same(known: int, opened: int) -> bool:
    """Return whether two descriptors refer to the same directory; False if `known` was closed meanwhile."""
    try:
        return os.path.samestat(os.fstat(known), os.fstat(opened))
    except OSError:
        # `fstat` failed because the descriptor `known` is closed. A program that becomes a background process may close
        # all its descriptors, these included. So the caller takes the new descriptor.
        return False
