"""The retention of checkpoints: where a job's checkpoints are, which are old, and which kept steps none of them needs.

Rank 0 finds this out from its store and from the directories. This module must never call a step unneeded only because
its directory cannot be found, for example because a file system is not mounted.
"""

from __future__ import annotations

import glob
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainer_client.client.transport.job_calls import JobCalls
from trainer_client.config.checkpoints import CheckpointsSection
from trainer_client.errors import CheckpointError, TrainerClientError
from trainer_client.training.run import checkpoint_files as files
from trainer_client.training.run.checkpoint_files import CheckpointManifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Present:
    """A checkpoint of this job whose manifest this process has seen in a directory.

    Attributes:
        is_renamed: whether the directory is not the one that the checkpoint was saved in.
        device: the number of the device that has the directory, by which a later look finds that it is unmounted.
        stamp: identifies the content of the manifest; see `_stamp_of`.
    """

    directory: Path
    tag: str
    is_renamed: bool
    device: int
    stamp: tuple[int, int] | None
    global_steps: int
    saved_at: float
    metric: float | None


class Retention:
    """Finds the checkpoints of one job that the config's retention gives up, and kept steps that none of them needs."""

    def __init__(self, calls: JobCalls, job: str, section: CheckpointsSection) -> None:
        self._calls = calls
        self._job = job
        self._section = section
        # The checkpoints of this job that this object has found in their directories, by the name of the kept step.
        self._seen: dict[str, _Present] = {}
        self._warned: set[str] = set()

    def was_saved_in(self, directory: Path, manifest: CheckpointManifest) -> bool:
        """Return whether the store keeps the step for the checkpoint in `directory`, which has this manifest.

        The answer is False if the directory is a copy of another checkpoint's, because that other checkpoint needs the
        step. It can raise StoreError.
        """
        if manifest.job != self._job:
            return False
        if (present := self._seen.get(manifest.kept)) is not None:
            return present.directory.resolve() == directory.resolve()
        notes = {step.name: step.note for step in self._calls.list_kept_steps()}
        return Path(notes.get(manifest.kept, "")).resolve() == directory.resolve()

    def note(self, manifest: CheckpointManifest, directory: Path, *, is_renamed: bool = False) -> None:
        """Record that a checkpoint is in `directory`, so that its kept step is needed. It can raise OSError."""
        self._seen[manifest.kept] = _Present(
            directory=directory,
            tag=manifest.tag,
            is_renamed=is_renamed,
            device=directory.stat().st_dev,
            stamp=_stamp_of(directory),
            global_steps=manifest.global_steps,
            saved_at=manifest.saved_at,
            metric=manifest.metric,
        )

    def drop(self, name: str) -> None:
        """Forget the checkpoint with the kept step `name`, because the step is not needed any more."""
        self._seen.pop(name, None)

    def unneeded(self, newest: CheckpointManifest) -> list[str]:
        """Return the kept steps that no checkpoint needs any more, and remove the manifests of old checkpoints.

        If the store does not answer, this is only logged, because the checkpoint `newest` is saved, and the next save
        calls this again.
        """
        try:
            return self._unneeded(newest)
        except TrainerClientError as error:
            log.warning("old checkpoints are not removed: %s", error)
            return []

    def _unneeded(self, newest: CheckpointManifest) -> list[str]:
        """Return what `unneeded` returns, but raise StoreError if the store does not answer.

        If a step's checkpoint is neither in its directory nor near it, the step is not needed if this process has seen
        the directory before on the file system that is mounted now. If not, the file system may only be unmounted, so
        the step is kept, and a warning says how to forget it.
        """
        steps = self._calls.list_kept_steps()
        before, self._seen = self._seen, {}
        manifests_below = cache(_manifests_below)
        gone = []
        for step in steps:
            name, present = step.name, before.get(step.name)
            if present is None and not step.note:
                continue
            directory = Path(step.note) if present is None else present.directory
            is_gone = False
            # If the directory cannot be read, for example because a file system is not mounted, the checkpoint does not
            # count as deleted.
            with suppress(OSError):
                if self._find(name, directory, present, manifests_below):
                    continue
                is_gone = present is not None and present.device == _device_of(directory)
            if is_gone:
                # A deleted checkpoint is logged as information and not as a warning, because the Trainer of
                # transformers deletes its oldest checkpoint at each save.
                log.info(
                    "the checkpoint %s was deleted, and is not under another name near there: its step is forgotten",
                    directory,
                )
                gone.append(name)
            elif name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "the store keeps a step for the checkpoint %s, which is not there: if it was deleted, run "
                    "`paramserver-admin forget %s %s`",
                    *(directory, self._job, name),
                )
        return [*gone, *self._remove_old(newest.kept)]

    def _find(
        self,
        name: str,
        directory: Path,
        present: _Present | None,
        manifests_below: Callable[[Path], Mapping[Path, CheckpointManifest]],
    ) -> bool:
        """Look for the checkpoint of a kept step, take note of where it is, and return whether it was found.

        The user may have renamed the checkpoint's directory, or the directory above it. It can raise OSError.

        Args:
            name: name of the kept step.
            directory: the directory in which the checkpoint was saved, or seen last.
            present: the checkpoint as this process has seen it before; None: it has not.
            manifests_below: the function `_manifests_below`, with a cache, because it reads many files.
        """
        stamp = _stamp_of(directory)
        if present is not None and stamp is not None and stamp == present.stamp:
            self._seen[name] = present
            return True
        if stamp is None and name in self._warned:
            return False
        found = _of_step(name, manifests_below(directory.parent))
        if not found:
            above = directory.parent.parent
            found = _of_step(name, _manifests_at(above.glob(f"*/{glob.escape(directory.name)}/{files.MANIFEST}")))
        if not found:
            return False
        place = directory if directory in found else next(iter(found))
        was_renamed = present is not None and present.is_renamed
        self.note(found[place], place, is_renamed=was_renamed or place != directory)
        return True

    def _remove_old(self, newest: str) -> list[str]:
        """Remove the manifests that the config's retention does not keep, and return the names of their kept steps.

        A manifest that cannot be removed stays with its step, until a later save succeeds in removing it.
        """
        # A checkpoint whose directory the user has renamed is never removed, and does not count for the numbers that
        # the config sets for retention.
        present = {name: seen for name, seen in self._seen.items() if not seen.is_renamed}
        needed = _to_keep(present, self._section)
        removed = []
        for name in present.keys() - needed - {newest}:
            directory = present[name].directory
            try:
                files.remove(directory, present[name].tag)
            except OSError as error:
                log.warning("the old checkpoint %s is not removed: %s", directory, error)
                continue
            del self._seen[name]
            removed.append(name)
        return removed


def _to_keep(seen: Mapping[str, _Present], section: CheckpointsSection) -> set[str]:
    """Return the names of the checkpoints that the retention keeps; all names if the section sets no number."""
    if section.keep_last is None and section.keep_every is None and section.keep_best is None:
        return set(seen)
    # The checkpoints are sorted by the time of saving and not by the step, because a run that has gone back to an
    # earlier step saves lower numbers later.
    newest = sorted(seen, key=lambda name: seen[name].saved_at, reverse=True)
    sign = 1 if section.best == "min" else -1
    # A metric that is not a number (NaN) never makes a checkpoint the best one.
    metrics = {name: metric for name in newest if (metric := seen[name].metric) is not None and not math.isnan(metric)}
    best = sorted(metrics, key=lambda name: sign * metrics[name])
    kept = set(newest[: section.keep_last or 1])
    kept |= set(best[: section.keep_best or 0])
    if section.keep_every is not None:
        kept |= {name for name, present in seen.items() if present.global_steps % section.keep_every == 0}
    return kept


def _manifests_below(parent: Path) -> dict[Path, CheckpointManifest]:
    """Return the manifests one and two levels below a directory, by the directories that have them."""
    return _manifests_at([*parent.glob(f"*/{files.MANIFEST}"), *parent.glob(f"*/*/{files.MANIFEST}")])


def _manifests_at(paths: Iterable[Path]) -> dict[Path, CheckpointManifest]:
    """Return the manifests that can be read, by the directories that have them, sorted."""
    found = {}
    for path in sorted(paths):
        with suppress(CheckpointError, OSError):
            found[path.parent] = files.read_manifest(path.parent)
    return found


def _of_step(name: str, manifests: Mapping[Path, CheckpointManifest]) -> dict[Path, CheckpointManifest]:
    return {place: manifest for place, manifest in manifests.items() if manifest.kept == name}


def _stamp_of(directory: Path) -> tuple[int, int] | None:
    """Return numbers that identify the content of a directory's manifest; None if there is no manifest.

    It can raise OSError.
    """
    try:
        found = (directory / files.MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns


def _device_of(path: Path) -> int | None:
    """Return the number of the device that has a path, or the nearest existing directory above it."""
    for place in (path, *path.parents):
        try:
            return place.stat().st_dev
        except OSError:
            continue
    return None
