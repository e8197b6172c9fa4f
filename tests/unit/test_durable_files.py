"""Each file that this project publishes is whole after any failure, and is on the disk before it has its name.

`PUBLISHED` has all callers of `paramserver/contract/durable_files.py`, and of `replace_file` in
`storage/base/syscalls.py`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paramserver.security.certificates import make_certificates
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from storage.base.errors import DeviceError
from storage.jobs import directories
from trainer_client.base.recorder import TraceSpan
from trainer_client.copying.backup_files import open_files
from trainer_client.engine.whole_model import WholeModel
from trainer_client.errors import BackupError, ExportError
from trainer_client.exchange.destination import open_destination
from trainer_client.training.report.perfetto import Process, write_trace
from trainer_client.training.run.checkpoint_files import write_all

# More bytes than a file object keeps in memory, so that some are written before the file is flushed.
CONTENT_BYTES = 40_000


def put_label(directory: Path, number: int) -> None:
    asyncio.run(directories._write_label(directory, {"store": "a" * CONTENT_BYTES, "file": number}))


def put_token(directory: Path, number: int) -> None:
    add_token(directory / "tokens.toml", f"token-{number}", Role.ADMIN)


def put_certificates(directory: Path, number: int) -> None:
    make_certificates(directory, ["localhost"], ["trainer"], number)


def put_checkpoint(directory: Path, number: int) -> None:
    write_all({directory / "tag/manifest": str(number) * CONTENT_BYTES, directory / "latest": f"the tag {number}" * 9})


def put_backup(directory: Path, number: int) -> None:
    open_files(str(directory)).write("shards/first", [str(number).encode() * CONTENT_BYTES, memoryview(b"end")])


def put_export(directory: Path, number: int) -> None:
    with open_destination(directory / "export", overwrite=True) as target, target.create("weights") as file:
        file.write(str(number).encode() * CONTENT_BYTES)


def put_weights(directory: Path, number: int) -> None:
    model = SimpleNamespace(
        _loop=SimpleNamespace(require_open=lambda: None),
        _parameter_state_dict=lambda exclude_frozen: {"weight": torch.full((CONTENT_BYTES,), number)},
        _collectives=SimpleNamespace(rank=0, any_rank=lambda flags, what: flags),
    )
    WholeModel.save_16bit_model(cast(Any, model), directory)


def put_trace(directory: Path, number: int) -> None:
    spans = [TraceSpan(row="steps", name=f"step {number}", began=1.0, ended=2.0)] * 500
    write_trace(directory / "trace.json", [Process(name="rank 0", spans=spans)], began=1.0, rows=["steps"])


# A function that puts a file or a directory in the place of the former one, and the name of the first one that it puts.
PUBLISHED: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "label": (put_label, directories.LABEL),
    "token": (put_token, "tokens.toml"),
    "certificates": (put_certificates, "server-key.pem"),
    "checkpoint": (put_checkpoint, "tag/manifest"),
    "backup": (put_backup, "shards/first"),
    "export": (put_export, "export"),
    "weights": (put_weights, "pytorch_model.bin"),
    "trace": (put_trace, "trace.json"),
}


@contextmanager
def failing_writes() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def failing_syncs(*, of_directories: bool) -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            real = getattr(os, name)

            def sync(descriptor: int, real: Callable[[int], None] = real) -> None:
                if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_directories:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                real(descriptor)

            patch.setattr(os, name, sync)
        yield errno.EIO


@contextmanager
def failing_rename(number: int) -> Iterator[int]:
    """Fail the rename of this number, from 0."""
    left = number
    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename"):
            real = getattr(os, name)

            def rename(source: Path, target: Path, real: Callable[[Path, Path], None] = real) -> None:
                nonlocal left
                left -= 1
                if left == -1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(source), None, str(target))
                real(source, target)

            patch.setattr(os, name, rename)
        yield errno.EIO


FAULTS: dict[str, Callable[[], AbstractContextManager[int]]] = {
    "write": failing_writes,
    "sync": lambda: failing_syncs(of_directories=False),
    "rename": lambda: failing_rename(0),
}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_fails(name: str, directory: Path, fault: Callable[[], AbstractContextManager[int]], where: str) -> None:
    put, _ = PUBLISHED[name]
    with pytest.raises((OSError, DeviceError, ExportError, BackupError)) as caught, fault() as number:
        put(directory, 2)
    assert where in str(caught.value) and os.strerror(number) in str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_leaves_the_former_file_and_names_it(tmp_path: Path, name: str, fault: str) -> None:
    put, first = PUBLISHED[name]
    put(tmp_path, 1)
    former = contents(tmp_path)
    assert_fails(name, tmp_path, FAULTS[fault], str(tmp_path / first))
    assert contents(tmp_path) == former
    put(tmp_path, 2)
    assert contents(tmp_path).keys() == former.keys() and contents(tmp_path) != former


@pytest.mark.parametrize("name", ["checkpoint", "export"])
def test_a_failure_after_the_first_rename_brings_the_former_files_back(tmp_path: Path, name: str) -> None:
    put, _ = PUBLISHED[name]
    put(tmp_path, 1)
    former = contents(tmp_path)
    assert_fails(name, tmp_path, lambda: failing_rename(1), str(tmp_path))
    assert contents(tmp_path) == former


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_directory_that_cannot_be_synced_is_named(tmp_path: Path, name: str) -> None:
    put, first = PUBLISHED[name]
    put(tmp_path, 1)
    former = contents(tmp_path)
    assert_fails(name, tmp_path, lambda: failing_syncs(of_directories=True), str((tmp_path / first).parent))
    assert contents(tmp_path).keys() == former.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    synced: list[Path] = []
    renamed: dict[Path, int] = {}
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    for call in ("replace", "rename"):
        real = getattr(os, call)

        def rename(source: Path, target: Path, real: Callable[[Path, Path], None] = real) -> None:
            if target.suffix != ".former":
                assert {source, *source.rglob("*")} <= set(synced)
                renamed[target] = len(synced)
            real(source, target)

        monkeypatch.setattr(os, call, rename)

    put, first = PUBLISHED[name]
    for number in (1, 2):
        put(tmp_path, number)
        assert tmp_path / first in renamed
        for path, before in renamed.items():
            assert path.parent in synced[before:]
        renamed.clear()
