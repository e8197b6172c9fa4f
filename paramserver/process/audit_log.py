"""The audit log: a file with one line of JSON for each call that destroys or stops something.

This module owns the file and its predecessor, which together have at most a fixed number of bytes. It must never fail a
call: an entry that cannot be written goes to the daemon's log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class AuditLog:
    """The file of the audit log. At half of the allowed bytes it is renamed to `NAME.1`, and a new file begins."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Prepare a log at `path`. The file is made when it is first written, for the daemon's user only."""
        self.path = path
        self._max_file_bytes = max_bytes // 2
        # A thread writes each entry. This lock is held meanwhile, so that entries are written one by one and in their
        # order.
        self._writing = asyncio.Lock()

    @property
    def former_path(self) -> Path:
        """The path of the file with the older entries, `NAME.1`."""
        return self.path.with_name(f"{self.path.name}.1")

    def check(self) -> None:
        """Make the file if it is not there. Raise OSError if it cannot be written."""
        self._write(b"")

    async def note(self, entry: Mapping[str, Any]) -> None:
        """Add an entry, with the present time in its field `time`, in seconds since 1970."""
        line = json.dumps({"time": round(time.time(), 3), **entry}) + "\n"
        async with self._writing:
            try:
                await asyncio.to_thread(self._write, line.encode())
            except OSError as error:
                log.error("the audit log %s cannot be written (%s); the entry is %s", self.path, error.strerror, line)

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size and size + len(line) + 1 > self._max_file_bytes:
                self.path.replace(self.former_path)
                return self._write(line)
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # The file ends with an incomplete line, because the disk was full or the daemon crashed. The new entry
                # begins on a line of its own, so that it can be parsed.
                line = b"\n" + line
            file.write(line)
        return None
