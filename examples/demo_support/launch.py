"""One launch of the trainer: torchrun and its ranks, observed through their journal.

This module owns the processes. All of them have ended when the context ends, also after an error. Each is ended by its
own id.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from demo_support.errors import DemoError, log_tail
from demo_support.journal import Journal

STOP_SECONDS = 20.0


class Launch:
    """A context that runs `torchrun SCRIPT ARGUMENTS --journal DIRECTORY/journal`."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        *,
        ranks: int,
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        directory.mkdir(parents=True)
        journal_dir = directory / "journal"
        self.journal = Journal(journal_dir, ranks)
        self._log_path = directory / "trainers.log"
        self._environment = environment
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *(str(script), *arguments, "--journal", str(journal_dir)),
        ]
        self._rank_handles: dict[int, int] = {}

    def __enter__(self) -> Self:
        with self._log_path.open("wb") as log_file:
            # The launch has its own session, so that Ctrl-C in the terminal reaches only the demo, which ends the
            # launch in order.
            self._agent = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._agent.poll() is None:
                self._agent.terminate()  # torchrun ends its ranks, then itself.
                with suppress(subprocess.TimeoutExpired):
                    self._agent.wait(STOP_SECONDS)
            self.kill()
        finally:
            for handle in self._rank_handles.values():
                os.close(handle)
            self._rank_handles.clear()

    def poll(self) -> bool:
        """Read the journal, and return whether the launch has ended with exit code 0.

        Raises:
            DemoError: the launch has ended with another exit code.
        """
        code = self._agent.poll()
        self.journal.refresh()
        for rank, start in self.journal.starts.items():
            if rank not in self._rank_handles:
                self._rank_handles[rank] = os.pidfd_open(start.pid)
        if code:
            raise DemoError(f"the trainers stopped with exit code {code}; their log ends:\n{log_tail(self._log_path)}")
        return code == 0

    def kill(self) -> list[int]:
        """Send SIGKILL to torchrun and to every rank; return their process ids once all have ended."""
        self._agent.kill()
        for handle in self._rank_handles.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        self._agent.wait()
        for handle in self._rank_handles.values():
            # The handle (a pidfd) becomes readable when the process has ended.
            select.select([handle], [], [], STOP_SECONDS)
        return [self._agent.pid, *(self.journal.starts[rank].pid for rank in self._rank_handles)]
