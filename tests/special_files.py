"""What may be at a path in place of a file: most of it would hold a program that opens or reads it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # A socket's path may have 107 bytes only, and is bound in the working directory of this descriptor.
        directory = os.open(path.parent, os.O_PATH)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


# Functions that make the thing at a path that is free.
SPECIAL_FILES: Mapping[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "directory": lambda path: path.mkdir(),
    "link to a device without end": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": _link_to_a_pipe,
    "link to a file of the kernel": lambda path: path.symlink_to("/proc/self/mem"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


def replace_with(path: Path, what: str) -> None:
    """Put a thing of SPECIAL_FILES in the place of a file."""
    path.unlink()
    SPECIAL_FILES[what](path)
