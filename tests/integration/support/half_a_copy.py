"""A copy that stops half-way and waits to be killed: `python -m ... FROM TO JOB FILE`. It makes FILE when it waits."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from trainer_client.client.store_client.connection import Connection
from trainer_client.client.transport.credentials import NO_CREDENTIALS
from trainer_client.copying.description import CopyProgress
from trainer_client.copying.put_step import copy_step


def main() -> None:
    origin, target, job, waits = sys.argv[1:]

    def on_progress(progress: CopyProgress) -> None:
        if 2 * progress.done_bytes >= progress.total_bytes:
            Path(waits).touch()
            threading.Event().wait()

    source, sink = (Connection(address, "half", NO_CREDENTIALS, prefer_streams=False) for address in (origin, target))
    copy_step(source, sink, job, on_progress=on_progress)
