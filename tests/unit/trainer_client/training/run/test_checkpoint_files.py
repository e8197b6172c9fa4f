"""The files of a checkpoint, and the user's state in a manifest, whatever its tensors are, and wherever they were."""

from __future__ import annotations

import base64
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from trainer_client.training.run.checkpoint_files import (
    MANIFEST,
    decode_user_state,
    encode_user_state,
    remove,
    write_all,
)


def test_a_state_with_tensors_of_a_device_that_is_not_there_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:99")
        torch.save({"average": torch.ones(2), "seen": {1, 2}}, buffer)
    encoded = {"torch": base64.b64encode(buffer.getvalue()).decode()}
    state = decode_user_state(encoded, "manifest")
    assert (state["average"].tolist(), state["average"].device.type, state["seen"]) == ([1, 1], "cpu", {1, 2})


def test_a_state_is_saved_although_it_names_a_device_that_torch_cannot_restore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:99")
    assert encode_user_state({"average": torch.ones(2), "seen": {1, 2}}).keys() == {"torch"}


def test_a_tensor_that_json_cannot_hold_is_saved_in_the_format_of_torch() -> None:
    sparse = torch.eye(2).to_sparse()
    encoded = encode_user_state({"mask": sparse})
    assert encoded.keys() == {"torch"}
    assert torch.equal(decode_user_state(encoded, "manifest")["mask"].to_dense(), torch.eye(2))


def test_a_checkpoint_whose_tag_has_several_parts_is_removed_with_the_name_in_latest(tmp_path: Path) -> None:
    for tag in ("a/b", "a/c"):
        write_all({tmp_path / tag / MANIFEST: "{}"})
    write_all({tmp_path / "latest": "a/b"})
    write_all({tmp_path / "a" / "latest": "c"})
    remove(tmp_path / "a/c", "a/c")
    # The file beside the directory is not the one that names the tag.
    assert (tmp_path / "a" / "latest").read_text() == "c"
    (tmp_path / "a" / "latest").unlink()
    assert (tmp_path / "latest").read_text() == "a/b"
    remove(tmp_path / "a/b", "a/b")
    assert list(tmp_path.iterdir()) == []


def test_the_entries_of_all_new_directories_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = set()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_all({tmp_path / "run" / "a" / "b" / MANIFEST: "{}"})
    assert synced >= {tmp_path, tmp_path / "run", tmp_path / "run" / "a", tmp_path / "run" / "a" / "b"}


def test_two_jobs_write_one_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_wrote = threading.Barrier(2, timeout=60)
    sync = os.fsync

    def wait_for_the_other(descriptor: int) -> None:
        sync(descriptor)
        if not Path(f"/proc/self/fd/{descriptor}").is_dir():
            both_wrote.wait()

    monkeypatch.setattr(os, "fsync", wait_for_the_other)
    texts = ["a" * 10_000, "b" * 9_999]
    with ThreadPoolExecutor(2) as threads:
        for writing in [threads.submit(write_all, {tmp_path / "latest": text}) for text in texts]:
            writing.result()
    assert (tmp_path / "latest").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
