"""Texts for users: where a job is stored, and what a user can do when the job cannot be resumed.

This module owns these texts. It must never contact a store.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paramserver.contract.sizes import least_size
from trainer_client.client.transport.credentials import Credentials
from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.run.local_daemon import local_address


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Where a job is stored: its name, and the daemon that has this rank's part. Texts for users are made from it.

    Attributes:
        job: name of the job.
        address: address of the daemon that stores this rank's part.
        state_dir: the directory of the job's own daemon, absolute; None: an operator runs the daemon.
        nvme_budget: the budget of the job's own daemon, if the config sets it.
        credentials: the credentials for the operator's daemon; None for the job's own daemon.
    """

    job: str
    address: str
    state_dir: Path | None = None
    nvme_budget: int | None = None
    credentials: Credentials | None = None

    @classmethod
    def of(cls, settings: TrainingConfig, environ: Mapping[str, str]) -> JobPlace:
        """Return the name, daemon and directory of the job that a config names."""
        section = settings.paramserver
        address = settings.store_address(environ)
        if address is not None:
            return cls(job=section.job, address=address, credentials=settings.credentials(environ))
        state_dir = settings.state_dir().absolute()
        budget = int(section.nvme_budget) if "nvme_budget" in section.model_fields_set else None
        return cls(job=section.job, address=local_address(state_dir), state_dir=state_dir, nvme_budget=budget)

    def __str__(self) -> str:
        if self.state_dir is not None:
            return f"the state directory {self.state_dir}"
        return f"the store at {self.address}"

    def ways_on(self, *, on_every_node: bool) -> str:
        """Return two lines of text that say how to train a model that differs from the stored one.

        Args:
            on_every_node: whether other stores have parts of the job, too, so that the job has to be deleted in each.
        """
        name = f"name another job (paramserver.job, which is {self.job!r})"
        give_up = "To give it up, on every node," if on_every_node else "To give it up,"
        if self.state_dir is None:
            return (
                f"To keep what is stored, {name} or another daemon (paramserver.address).\n{give_up} delete the job: "
                f"{self._deletion()}"
            )
        budget = "" if self.nvme_budget is None else f" --nvme-budget {least_size(self.nvme_budget)}"
        return (
            f"To keep what is stored, {name} or another state directory (paramserver.state_dir, or nvme_path, which is "
            f"{self.state_dir}).\n{give_up} delete that directory with all its jobs, or this job alone: run "
            f"`paramserver serve --state-dir {shlex.quote(str(self.state_dir))}{budget}`, and beside it "
            f"{self._deletion()}"
        )

    def _deletion(self) -> str:
        """Return the shell command that a user enters to delete the job at its daemon."""
        words = ["paramserver-admin"]
        if self.credentials is not None:
            files = {
                "--token-file": self.credentials.token_file,
                "--tls-ca": self.credentials.tls_ca,
                "--tls-certificate": self.credentials.tls_certificate,
                "--tls-key": self.credentials.tls_key,
            }
            words += [word for flag, path in files.items() if path is not None for word in (flag, str(path))]
            words += ["--insecure"] if self.credentials.insecure else []
        words += ["delete-job", "--address", self.address]
        # The command line would take a job name that begins with a hyphen for an option, so "--" is put before the
        # name.
        words += ["--", self.job] if self.job.startswith("-") else [self.job]
        return f"`{shlex.join(words)}`"
