"""The kept steps of checkpoints: which are forgotten, and which stay, whatever becomes of ranks and directories."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from trainer_client.checkpoint import ds_to_universal
from trainer_client.config.checkpoints import CheckpointsSection
from trainer_client.errors import CheckpointError, CollectiveError
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.model.plain_state import PlainState
from trainer_client.training.run import checkpoint_files as files
from trainer_client.training.run import client_state
from trainer_client.training.run.checkpoints import Checkpoints


class Collectives:
    """The collectives of a run of one rank, which can fail in one of its exchanges."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.exchanges: list[str] = []
        self.failing_exchange: int | None = None

    def gather_bytes(self, content: bytes, what: str = "") -> list[bytes]:
        self.exchanges.append(what)
        if len(self.exchanges) == self.failing_exchange:
            raise CollectiveError(f"{what}: another rank has gone")
        return [content]

    def broadcast_id(self, content: bytes) -> bytes:
        return content


class RanksOnThreads:
    """The collectives of one of several ranks, each of which has a thread of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[bytes]) -> None:
        self.rank, self.world_size = rank, barrier.parties
        self._barrier = barrier
        self._given = given

    @classmethod
    def of(cls, number: int) -> list[RanksOnThreads]:
        barrier, given = threading.Barrier(number, timeout=60), [b""] * number
        return [cls(rank, barrier, given) for rank in range(number)]

    def gather_bytes(self, content: bytes, what: str = "") -> list[bytes]:
        self._given[self.rank] = content
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def broadcast_id(self, content: bytes) -> bytes:
        return self.gather_bytes(content)[0]


class Store:
    """A store that keeps the names and notes of steps."""

    address, epoch, credentials = "unix:/store", "epoch", None

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        # The calls about the job are methods of this class, too.
        self.job = self

    def keep_step(self, step: int, name: str, note: str) -> Any:
        self.notes[name] = note
        return SimpleNamespace(state_dir="/state")

    def forget_step(self, name: str) -> None:
        self.notes.pop(name, None)

    def list_kept_steps(self) -> list[Any]:
        return [SimpleNamespace(name=name, note=note) for name, note in self.notes.items()]


class Run:
    """A run of one rank that saves checkpoints. A run that gets the store of another one goes on with its job."""

    def __init__(
        self, store: Store | None = None, *, job: str = "job", collectives: Any = None, **retention: Any
    ) -> None:
        model = nn.Linear(2, 2)
        user: Any = SimpleNamespace(module=model, parameters=list_parameters(model))
        section = SimpleNamespace(job=job, checkpoints=CheckpointsSection(**retention), peers=())
        checkpoint = SimpleNamespace(tag_validation="Warn", load_universal=False)
        self.store, self.collectives = store or Store(), collectives or Collectives()
        self._settings = SimpleNamespace(paramserver=section, checkpoint=checkpoint)
        rank: Any = SimpleNamespace(store=self.store, collectives=self.collectives, settings=self._settings)
        self._checkpoints = Checkpoints(user, rank, [], leads_store=self.collectives.rank == 0)
        self._state = client_state.encode({"model": PlainState(model, user.parameters).to_commit()})

    def save(
        self,
        save_dir: Path,
        tag: str,
        step: int = 1,
        metric: float | None = None,
        user_state: Any = MappingProxyType({}),
    ) -> Path:
        return self._checkpoints.save(
            save_dir,
            tag,
            step=step,
            global_steps=step,
            run_state=self._state,
            user_state=user_state,
            metric=metric,
            save_latest=True,
            is_within_step=False,
        )

    def can_load(self, directory: Path) -> bool:
        """Return whether the store keeps the step that the manifest in a directory names."""
        return files.read_manifest(directory).kept in self.store.notes


def test_a_step_that_a_manifest_names_stays_when_another_rank_is_lost(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path, "last", 1)
    exchanges = len(run.collectives.exchanges)
    saved = [run.can_load(tmp_path / "last")]
    # The tag, the digests of states, the steps in the stores and the files are exchanged before the end of the save.
    for lost_in in (1, 2, 3, 4, 5):
        run.collectives.failing_exchange = len(run.collectives.exchanges) + lost_in
        with pytest.raises(CollectiveError):
            run.save(tmp_path, "last", 1 + lost_in)
        saved.append(run.can_load(tmp_path / "last"))
    assert (exchanges, saved) == (5, [True] * 6)


def test_what_is_equal_on_all_ranks_is_saved_once(tmp_path: Path) -> None:
    store, ranks = Store(), RanksOnThreads.of(3)
    runs = [Run(store, collectives=rank) for rank in ranks]
    texts = ["a" * 1000, "b" * 1000, "a" * 1000]
    with ThreadPoolExecutor(len(runs)) as threads:
        saves = [
            threads.submit(run.save, tmp_path, "last", user_state={"text": text})
            for run, text in zip(runs, texts, strict=True)
        ]
        saved = {save.result() for save in saves}.pop()
    manifest = files.read_manifest(saved)
    # A rank that has not saved has the state of the first one.
    states = [files.decode_user_state(manifest.client_state_of(rank), "") for rank in range(4)]
    assert [state["text"] for state in states] == [*texts, texts[0]]
    assert (manifest.client_states[2], manifest.buffers[1:]) == ({}, ("", ""))
    assert manifest.buffers_of(2) == manifest.buffers_of(3) == manifest.buffers[0]


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    saved = run.save(tmp_path, "last", user_state={"text": "a" * 30_000})
    before, kept = (saved / files.MANIFEST).read_text(), dict(run.store.notes)
    monkeypatch.setattr(files, "_MOST_BYTES", 60_000)
    with pytest.raises(
        CheckpointError, match=r"'last' would have \d+ bytes, of which the ranks' client_state has 700\d\d and"
    ):
        run.save(tmp_path, "last", 2, user_state={"text": "a" * 70_000})
    assert ((saved / files.MANIFEST).read_text(), run.store.notes) == (before, kept)


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("copied_with", ["ds_to_universal", "copytree"])
def test_a_copy_that_is_replaced_leaves_the_step_of_its_original(
    tmp_path: Path, copied_with: str, is_resumed: bool
) -> None:
    run = Run()
    original = run.save(tmp_path, "original")
    if copied_with == "copytree":
        shutil.copytree(original, tmp_path / "copy")
    else:
        folders = SimpleNamespace(input_folder=str(original), output_folder=str(tmp_path / "copy"))
        ds_to_universal.main(folders)
    if is_resumed:
        run = Run(run.store)
    for step in (2, 3):
        copy = run.save(tmp_path, "copy", step)
        assert run.can_load(original)
        assert run.can_load(copy)
        assert len(run.store.notes) == 2


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_checkpoint_that_is_replaced_through_a_link_forgets_its_step(tmp_path: Path, is_resumed: bool) -> None:
    run = Run()
    run.save(tmp_path / "run", "tag")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    if is_resumed:
        run = Run(run.store)
    run.save(tmp_path / "link", "tag", 2)
    assert run.can_load(tmp_path / "run" / "tag")
    assert len(run.store.notes) == 1


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_last_checkpoints_are_those_that_were_saved_last(tmp_path: Path, is_resumed: bool) -> None:
    run = Run(keep_last=3)
    for step in (800, 900, 1000):
        run.save(tmp_path, f"step{step}", step)
    # The run goes back to step 800, from which another history begins.
    if is_resumed:
        run = Run(run.store, keep_last=3)
    for step in (850, 880, 890):
        run.save(tmp_path, f"step{step}", step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step850", "step880", "step890"]
    assert len(run.store.notes) == 3


def test_of_equally_good_checkpoints_the_one_that_was_saved_last_is_the_best(tmp_path: Path) -> None:
    run = Run(keep_best=1)
    for step, metric in ((900, 1.0), (850, 1.0), (870, 2.0)):
        run.save(tmp_path, f"step{step}", step, metric)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step850", "step870"]


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("place", ["best", "protected/step1"])
def test_a_checkpoint_whose_directory_is_renamed_stays(
    tmp_path: Path, place: str, is_resumed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(keep_last=1)
    saved = run.save(tmp_path, "step1", 1)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    saved.rename(tmp_path / place)
    if is_resumed:
        run = Run(run.store, keep_last=1)
    for step in (2, 3):
        run.save(tmp_path, f"step{step}", step)
        assert run.can_load(tmp_path / place)
    assert len(run.store.notes) == 2
    assert caplog.records == []
    # A checkpoint that is saved in its place replaces it.
    if "/" not in place and not is_resumed:
        run.save(tmp_path, place, 4)
        assert run.can_load(tmp_path / place)
        assert len(run.store.notes) == 1


def test_a_checkpoint_whose_name_is_taken_after_it_was_renamed_stays(tmp_path: Path) -> None:
    run = Run(keep_last=1)
    for step in (1, 2, 3):
        run.save(tmp_path, "last", step).rename(tmp_path / f"step{step}")
    last = run.save(tmp_path, "last", 4)
    assert all(run.can_load(directory) for directory in (last, *(tmp_path / f"step{step}" for step in (1, 2, 3))))


def test_a_copy_takes_the_place_of_a_deleted_checkpoint(tmp_path: Path) -> None:
    run = Run()
    saved = run.save(tmp_path, "step1")
    shutil.copytree(saved, tmp_path / "copy")
    shutil.rmtree(saved)
    run.save(tmp_path, "step2", 2)
    assert run.can_load(tmp_path / "copy")


def test_the_step_of_a_deleted_checkpoint_is_forgotten_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = Run()
    saved = run.save(tmp_path, "step1")
    shutil.rmtree(saved)
    run.save(tmp_path, "step2", 2)
    assert len(run.store.notes) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoint {saved} was deleted, and is not under another name near there: its step is forgotten"
    ]


def test_a_step_stays_while_its_directory_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    saved = run.save(tmp_path, "step1")
    stat = Path.stat

    def refuse(path: Path, **arguments: Any) -> Any:
        if path.parent == saved:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **arguments)

    monkeypatch.setattr(Path, "stat", refuse)
    run.save(tmp_path, "step2", 2)
    monkeypatch.undo()
    assert run.can_load(saved)


def test_the_retention_leaves_the_manifest_of_another_job_alone(tmp_path: Path) -> None:
    mine, other = Run(keep_last=1), Run(job="another")
    mine.save(tmp_path, "step1", 1)
    other.save(tmp_path, "step1", 1)
    mine.save(tmp_path, "step2", 2)
    assert other.can_load(tmp_path / "step1")
    # The manifest of this job's own step is gone, so the step is as well.
    assert len(mine.store.notes) == 1


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("tag", ["step1", "loss[0.5]*"])
def test_checkpoints_whose_common_directory_is_renamed_stay(tmp_path: Path, tag: str, is_resumed: bool) -> None:
    run = Run(keep_last=1)
    run.save(tmp_path / "run", tag)
    (tmp_path / "run").rename(tmp_path / "better run")
    if is_resumed:
        run = Run(run.store, keep_last=1)
    for step in (2, 3):
        run.save(tmp_path / "run", f"step{step}", step)
    assert run.can_load(tmp_path / "better run" / tag)
    assert len(run.store.notes) == 2


def test_a_directory_that_cannot_be_removed_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    first, second, third = (run.save(tmp_path, f"step{step}", step) for step in (1, 2, 3))
    remove = files.remove

    def refuse(directory: Path, tag: str) -> None:
        if directory == second:
            raise PermissionError(13, "Permission denied", str(directory))
        remove(directory, tag)

    run = Run(run.store, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", refuse)
        run.save(tmp_path, "step4", 4)
    assert (first.exists(), second.exists(), third.exists()) == (False, True, False)
    assert run.can_load(second)
    assert len(run.store.notes) == 2
    assert f"the old checkpoint {second} is not removed: [Errno 13]" in caplog.text
    run.save(tmp_path, "step5", 5)
    assert not second.exists()
    assert len(run.store.notes) == 1


def test_the_retention_works_where_the_store_cannot_note_the_directory(tmp_path: Path) -> None:
    run = Run(keep_last=1)
    for step in (1, 2, 3):
        run.save(tmp_path / "not\u00a0printable", f"step{step}", step)
    assert list(run.store.notes.values()) == [""]
    assert run.can_load(tmp_path / "not\u00a0printable" / "step3")


# A save in the place of another one syncs the two former files, the two new ones, and the two directories. A save under
# a new tag has no former manifest, and makes a directory, whose parent is synced.
@pytest.mark.parametrize("synced", range(6))
def test_a_save_that_fails_for_want_of_room_leaves_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: int
) -> None:
    run = Run()
    saved = run.save(tmp_path, "last", 1)
    former, left, sync = (saved / files.MANIFEST).read_text(), synced, os.fsync

    def fill_the_disk(descriptor: int) -> None:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= 1
        sync(descriptor)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", fill_the_disk)
        run.save(tmp_path, "last", 2)
    assert (saved / files.MANIFEST).read_text() == former
    assert run.can_load(saved) and len(run.store.notes) == 1
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        left = synced
        patch.setattr(os, "fsync", fill_the_disk)
        run.save(tmp_path, "new", 3)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "last",
        f"last/{files.MANIFEST}",
        "latest",
    ]
    assert (tmp_path / "latest").read_text() == "last" and len(run.store.notes) == 1
    assert run.can_load(run.save(tmp_path, "last", 4))
