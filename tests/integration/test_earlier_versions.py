"""A backup of an earlier version's job is restored, and the job goes on bit for bit as plain PyTorch does.

backup_of_093662e.tar.gz has the job that support/earlier_job.py made in a checkout of commit 093662e of 23 November
2026, whose commits had no entries for the model's names and buffers, for samples, and for the settings of their run.
Its state directory had format 4, so the backup was made as docs/admin.md says, at a daemon of the last commit that
reads it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paramserver.admin.cli import app
from tests.integration.support import earlier_job
from tests.integration.support.daemon import Daemon

DATA = Path(__file__).with_name("data")


@pytest.mark.parametrize("commit", ["093662e"])
def test_a_restored_job_of_an_earlier_version_goes_on_bit_for_bit(
    commit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unpack(DATA / f"backup_of_{commit}.tar.gz", tmp_path)
    state = tmp_path / earlier_job.STATE
    with Daemon(state) as daemon:
        command = ["restore", earlier_job.JOB, str(tmp_path / earlier_job.BACKUP), "--address", daemon.address]
        assert CliRunner().invoke(app, command).exit_code == 0
        assert daemon.stop() == 0
    model, optimizer, scheduler = earlier_job.plain()
    reference = torch.load(tmp_path / earlier_job.REFERENCE, weights_only=True)
    model.load_state_dict(reference["model"])
    optimizer.load_state_dict(reference["optimizer"])
    scheduler.load_state_dict(reference["scheduler"])
    torch.set_rng_state(reference["random"])
    earlier_job.train_plain(model, optimizer, scheduler, range(earlier_job.STORED_STEPS, earlier_job.ALL_STEPS))
    with earlier_job.open_engine(state) as engine:
        assert engine.global_steps == earlier_job.STORED_STEPS
        assert engine.global_samples == earlier_job.STORED_STEPS * engine.train_batch_size()
        earlier_job.train(engine, earlier_job.ALL_STEPS)
        trained = earlier_job.values_of(engine)
    for name, value in model.named_parameters():
        assert torch.equal(trained[name], value), name
    # Later commits have the new entries, so a second resume finds them.
    assert "An earlier version made this commit and noted less" in caplog.text
    caplog.clear()
    with earlier_job.open_engine(state) as engine:
        assert engine.global_steps == earlier_job.ALL_STEPS
        assert "noted less" not in caplog.text
        again = earlier_job.values_of(engine)
    assert all(torch.equal(again[name], value) for name, value in trained.items())


def unpack(archive: Path, target: Path) -> None:
    """Write the files of an archive below a directory."""
    with tarfile.open(archive) as source:
        # extractall() warns from Python 3.12 on unless it is given a filter, which Python 3.11.3 does not know yet.
        for member in source.getmembers():
            if (content := source.extractfile(member)) is not None:
                (target / member.name).parent.mkdir(parents=True, exist_ok=True)
                (target / member.name).write_bytes(content.read())
