"""The files of a checkpoint: a manifest that says where the step is kept, and `latest`, which names the newest tag.

The layout of the directories is DeepSpeed's: `SAVE_DIR/TAG/` and `SAVE_DIR/latest`. The manifest is one JSON file, so
that a checkpoint exists completely or not at all. It has the state of the run and the user's own state; the tensors
stay in the store. This module must never unpickle anything but what client_state.py admits, and must never trust a
file: each file is verified before its values are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from paramserver.contract.documents import parse_json
from paramserver.contract.durable_files import make_directory, prepared, sync_directory
from trainer_client.base.foreign.files import read_regular
from trainer_client.errors import CheckpointError, ClientStateError
from trainer_client.training.run import client_state
from trainer_client.training.run.stored_state import decode_stored

MANIFEST = "paramserver_checkpoint.json"
LATEST = "latest"
# The name of the file that names the newest universal checkpoint. DeepSpeed uses the same name; see
# checkpoint/ds_to_universal.py.
LATEST_UNIVERSAL = "latest_universal"
FORMAT = 1

# The largest size of a manifest that is written and read, in bytes. The limit bounds the memory that a manifest of
# unknown origin can take. A manifest has the random states, schedules, user values and buffers of each rank, and most
# manifests have some kilobytes.
_MOST_BYTES = 1 << 30
_MOST_TAG_BYTES = 255
# Patterns for the names of files that DeepSpeed writes into the directory of a tag. A directory with such a file is a
# checkpoint of DeepSpeed.
_FILES_OF_DEEPSPEED = ("*_optim_states.pt", "*_model_states.pt", "*.distcp", "mp_rank_*")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAt:
    """A store that keeps a part of the checkpoint's step: its address at the save, and its state directory."""

    address: str
    state_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The content of a checkpoint's file: where the stores keep the step, and the values that are not tensors.

    Attributes:
        tag: the name of the checkpoint's directory.
        job, kept: the job in the stores, and the name under which they keep the step.
        step: the number of the commit in the stores.
        global_steps: the engine's count of steps, which `step` exceeds if states were changed between steps.
        stores: the stores that keep the step.
        metric: the number by which `keep_best` compares steps, given by the user; None: there is none.
        run_states: for each rank the encoded state of its run, as commits carry it.
        client_states: for each rank the user's state, as `encode_user_state` gives it; {}: equal to that of rank 0.
        buffers: for each rank the model's buffers, encoded as the states are; "": equal to those of rank 0.
        saved_at: the time of the save, in seconds since 1970.
    """

    tag: str
    job: str
    kept: str
    step: int
    global_steps: int
    stores: tuple[KeptAt, ...]
    metric: float | None
    run_states: tuple[str, ...]
    client_states: tuple[Mapping[str, str], ...]
    buffers: tuple[str, ...]
    saved_at: float

    def client_state_of(self, rank: int) -> Mapping[str, str]:
        """Return the encoded user's state of a rank; if the rank has saved none, the state of rank 0."""
        return (self.client_states[rank] if rank < len(self.client_states) else {}) or self.client_states[0]

    def buffers_of(self, rank: int) -> str:
        """Return the encoded buffers of a rank; if the rank has saved none, the buffers of rank 0."""
        return (self.buffers[rank] if rank < len(self.buffers) else "") or self.buffers[0]

    def to_json(self) -> str:
        """Return the text of the manifest's file. Raise CheckpointError if it is too large to be read again."""
        content = asdict(self)
        text = json.dumps({"format": FORMAT, "checksum": _checksum(content), "checkpoint": content})
        if len(text) > _MOST_BYTES:
            of_users = sum(len(value) for state in self.client_states for value in state.values())
            raise CheckpointError(
                f"the manifest of checkpoint {self.tag!r} would have {len(text)} bytes, of which the ranks' "
                f"client_state has {of_users} and their buffers {sum(map(len, self.buffers))}, and at most "
                f"{_MOST_BYTES} can be loaded: save large values in files of your own, and name these in client_state; "
                "register buffers that never change with persistent=False"
            )
        return text

    @classmethod
    def from_json(cls, text: str | bytes, path: str) -> CheckpointManifest:
        """Return the manifest that `to_json` made this text of.

        Raises:
            CheckpointError: the text is not a manifest, is damaged, or is of a later version; the message names `path`.
        """
        try:
            document = parse_json(text)
            if document["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has format {str(document['format'])[:20]}, and this version reads {FORMAT}: load it with "
                    "the version that saved it"
                )
            content = document["checkpoint"]
            if document["checksum"] != _checksum(content):
                raise CheckpointError(f"{path} is damaged: its checksum is not that of its content; load another tag")
            manifest = cls(
                **content
                | {
                    "stores": tuple(KeptAt(**store) for store in content["stores"]),
                    "run_states": tuple(content["run_states"]),
                    "client_states": tuple(content["client_states"]),
                    "buffers": tuple(content["buffers"]),
                }
            )
            manifest._check_types()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no manifest of a checkpoint: {type(error).__name__}: {error}") from None
        return manifest

    def _check_types(self) -> None:
        """Raise TypeError unless all values have the types that they are declared with."""
        texts = (self.tag, self.job, self.kept, *self.run_states, *self.buffers)
        texts += tuple(text for store in self.stores for text in (store.address, store.state_dir))
        numbers = (self.step, self.global_steps)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is not a text")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("a number of a step is not a number")
        if not isinstance(self.metric, int | float | None) or not isinstance(self.saved_at, int | float):
            raise TypeError("a measure is not a number")
        if not self.run_states or {len(self.client_states), len(self.buffers)} != {len(self.run_states)}:
            raise TypeError("the numbers of ranks differ")
        if not all(isinstance(state, dict) for state in self.client_states):
            raise TypeError("a user's state is not an object")


def encode_user_state(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's state for a manifest: as JSON or, if it has types that JSON lacks, in torch's format.

    Raises:
        CheckpointError: torch would not load the state with `weights_only=True`.
    """
    try:
        return client_state.encode_freely(state)
    except ClientStateError as error:
        raise CheckpointError(f"save_checkpoint(client_state=...): {error}") from None


def decode_user_state(encoded: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the state of which `encode_user_state` made `encoded`, with its tensors on the CPU.

    It can raise CheckpointError, which names `path`.
    """
    try:
        return client_state.decode_freely(encoded)
    except ClientStateError as error:
        raise CheckpointError(f"{path}: its client state cannot be read: {error}") from None


def decode_run_state(encoded: str, path: str) -> dict[str, Any]:
    """Return the decoded state of a rank's run in a manifest. It can raise CheckpointError, which names `path`."""
    return _decoded(decode_stored, "state of the run", encoded, path)


def decode_buffers(encoded: str, path: str) -> dict[str, torch.Tensor]:
    """Return the model's buffers of a rank by their names. It can raise CheckpointError, which names `path`."""
    return _decoded(client_state.decode, "buffers", encoded, path)


def _decoded(decode: Callable[[bytes], dict[str, Any]], what: str, encoded: str, path: str) -> dict[str, Any]:
    try:
        return decode(encoded.encode())
    except (ClientStateError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: its {what} cannot be read: {error}") from None


def check_tag(tag: str) -> str:
    """Return a tag as a relative path. Raise CheckpointError unless it names a directory below the save directory."""
    path = PurePosixPath(tag)
    if (
        not path.parts
        or path.is_absolute()
        or ".." in path.parts
        or not tag.isprintable()
        or len(tag.encode()) > _MOST_TAG_BYTES
    ):
        raise CheckpointError(
            f"the tag of a checkpoint is the name of a directory, of 1 to {_MOST_TAG_BYTES} bytes: {tag[:80]!r} is none"
        )
    return str(path)


def read_latest(directory: Path, name: str = LATEST) -> str | None:
    """Return the tag in the file `name` (by default `latest`) of a directory; None if there is no such file.

    It can raise CheckpointError, OSError.
    """
    try:
        content = read_regular(directory / name, _MOST_TAG_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        return check_tag(content.decode().strip())
    except ValueError as error:
        raise CheckpointError(f"{directory / name} names no tag: {error}") from None


def read_manifest(directory: Path) -> CheckpointManifest:
    """Return the manifest in the directory of a tag.

    Raises:
        CheckpointError: there is no manifest, it is damaged, or the directory has files of DeepSpeed's.
        OSError: the file cannot be read.
    """
    path = directory / MANIFEST
    try:
        content = read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        if any(found for pattern in _FILES_OF_DEEPSPEED for found in directory.glob(pattern)):
            raise CheckpointError(
                f"{directory} has a checkpoint that DeepSpeed has written: bring it into the store with `paramserver "
                "import`, and resume the job that it makes"
            ) from None
        raise CheckpointError(f"{directory} has no checkpoint: there is no {MANIFEST} in it") from None
    return CheckpointManifest.from_json(content, str(path))


def write_all(contents: Mapping[Path, str]) -> None:
    """Write files that appear when all of them are complete and on the disk. After an error none of them has changed.

    Copies of the former files are written, too, before any new file gets its name. They are put back after an error,
    when a full disk might have no room to write them. It can raise OSError.
    """
    with ExitStack() as stack:

        def prepare(path: Path, content: bytes) -> Callable[[], None]:
            make_directory(path.parent)
            return stack.enter_context(prepared(path, lambda file: file.write(content)))

        former = [(path, _read(path)) for path in contents]
        put_former = [
            partial(_remove_file, path) if content is None else prepare(path, content) for path, content in former
        ]
        put_new = [prepare(path, text.encode()) for path, text in contents.items()]
        try:
            for put in put_new:
                put()
        except OSError:
            for put in put_former:
                with suppress(OSError):
                    put()
            raise


def _read(path: Path) -> bytes | None:
    """Return the content of a file; None if there is no file. It can raise OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _remove_file(path: Path) -> None:
    """Remove a file if there is one, also from the disk. It can raise OSError."""
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def root_of(directory: Path, tag: str) -> Path:
    """Return the directory in which `save_checkpoint` has made the directory of a tag, which may have several parts."""
    return directory.parents[len(PurePosixPath(tag).parts) - 1]


def remove(directory: Path, tag: str) -> None:
    """Remove the manifest of a tag in `directory`, and then the directories of the tag that are empty.

    `latest` is removed, too, if it names the tag. It can raise OSError.
    """
    (directory / MANIFEST).unlink(missing_ok=True)
    latest = root_of(directory, tag) / LATEST
    with suppress(OSError, ValueError):
        if latest.read_text().strip() == tag:
            latest.unlink()
    remove_empty(directory, tag)


def remove_empty(directory: Path, tag: str) -> None:
    """Remove the empty directories of a tag. A directory in which the user has other files stays."""
    root = root_of(directory, tag)
    with suppress(OSError):
        while directory != root:
            directory.rmdir()
            directory = directory.parent


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
