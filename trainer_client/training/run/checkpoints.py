"""Checkpoints with DeepSpeed's verbs: steps that the stores keep, and a small manifest of each in a directory.

Saving copies nothing: the stores keep the newest commit under a name, and rank 0 writes the manifest. Loading makes a
new commit with the values of a kept step, of any job and any number of ranks. So loading deletes no checkpoint, also
none that is later than the loaded one. This module owns the names of the steps that are kept for checkpoints. It must
never forget a step that a manifest names, unless retention.py says that no checkpoint needs the step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer_client.errors import CheckpointError, CollectiveError, ConfigError, StoreError, TrainerClientError
from trainer_client.training.model.buffers import give_buffers
from trainer_client.training.model.parameters import note_new_values
from trainer_client.training.model.plain_state import PlainState
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.run import checkpoint_files as files
from trainer_client.training.run import client_state, relayout
from trainer_client.training.run.checkpoint_files import CheckpointManifest, KeptAt
from trainer_client.training.run.context import RankContext, UserObjects
from trainer_client.training.run.kept_source import KeptSource, find_source
from trainer_client.training.run.retention import Retention
from trainer_client.training.run.stored_state import groups_of
from trainer_client.training.run.stored_step import StoreAddress, StoredStep

log = logging.getLogger(__name__)

_NONCE_BYTES = 4
# The largest size in bytes of the note that the store keeps with a kept step. The note is the path of the checkpoint's
# directory. A longer path is not stored.
_MOST_NOTE_BYTES = 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that `find` has found, as this rank sees it.

    Attributes:
        path: the file of its manifest.
        manifest: the checkpoint.
        source: the stores that keep its step.
        run_state: the state of the run for this rank.
        client_state: the user's state for this rank.
        buffers: the model's buffers by name.
    """

    path: str
    manifest: CheckpointManifest
    source: KeptSource
    run_state: dict[str, Any]
    client_state: dict[str, Any]
    buffers: Mapping[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run, which this rank saves and finds together with the other ranks."""

    def __init__(
        self, user: UserObjects, rank: RankContext, states: Sequence[PlacedStates], *, leads_store: bool
    ) -> None:
        """Begin without a known checkpoint.

        Args:
            leads_store: whether this rank speaks for all ranks of its store, so that it alone has the store keep and
                forget steps.
        """
        self._user = user
        self._plain = PlainState(user.module, user.parameters)
        self._states = states
        self._store = rank.store
        self._collectives = rank.collectives
        self._settings = rank.settings
        self._job = rank.settings.paramserver.job
        self._leads_store = leads_store
        self._retention = Retention(rank.store.job, self._job, rank.settings.paramserver.checkpoints)

    def save(
        self,
        save_dir: str | Path,
        tag: str,
        *,
        step: int,
        global_steps: int,
        run_state: bytes,
        user_state: Mapping[str, Any],
        metric: float | None,
        save_latest: bool,
        is_within_step: bool,
    ) -> Path:
        """Keep the commit `step` in all stores, and write a manifest of it. All ranks must call this.

        The manifest has the small buffers of the model as the commit has them. The commit has no room for large
        buffers, so these get their values of this moment, and a warning names them if a step is under way.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError, StoreError, OSError: this or another rank failed to save the checkpoint. In this case no
                step is kept, and an earlier checkpoint of the same tag is unchanged.
            CollectiveError: the ranks lost each other. It is not known whether the checkpoint is saved, so the stores
                keep the step.
        """
        tag = files.check_tag(self._agree_on(tag))
        directory = Path(save_dir).absolute() / tag
        nonce = self._collectives.broadcast_id(secrets.token_bytes(_NONCE_BYTES)).hex()
        name, note = f"{tag}.{nonce}", str(directory)
        if len(note.encode()) > _MOST_NOTE_BYTES or not note.isprintable():
            note = ""

        own = self._encode(run_state, user_state, is_within_step=is_within_step)

        def keep() -> dict[str, Any]:
            part = {"run_state": run_state.decode(), **own}
            if self._leads_store:
                answer = self._store.job.keep_step(step, name, note)
                part["store"] = {"address": self._store.address, "state_dir": answer.state_dir}
            return part

        try:
            parts = self._on_all_ranks("save_checkpoint()", keep)
            manifest = CheckpointManifest(
                tag=tag,
                job=self._job,
                kept=name,
                step=step,
                global_steps=global_steps,
                stores=tuple(KeptAt(**part["store"]) for part in parts if "store" in part),
                metric=metric,
                run_states=tuple(part["run_state"] for part in parts),
                client_states=tuple(part["client_state"] for part in parts),
                buffers=tuple(part["buffers"] for part in parts),
                saved_at=time.time(),
            )
            unneeded = self._on_rank_0(
                "save_checkpoint()", lambda: self._write(manifest, directory, save_latest=save_latest)
            )
        except CollectiveError:
            # Rank 0 may have written the manifest, which refers to the kept step, so the step is not forgotten.
            raise
        except (TrainerClientError, OSError):
            self._forget([name])
            raise
        self._forget(unneeded)
        self._forget(self._on_rank_0("the retention of checkpoints", lambda: self._retention.unneeded(manifest)))
        return directory

    def _encode(self, run_state: bytes, user_state: Mapping[str, Any], *, is_within_step: bool) -> dict[str, Any]:
        """Return this rank's own part of a manifest. All ranks must call this; it raises as `save`.

        An empty value stands for the value of rank 0, so that values which are equal on all ranks are sent and saved
        once.
        """
        own: dict[str, Any] = {}

        def encode() -> dict[str, str]:
            own["client_state"] = files.encode_user_state(user_state)
            own["buffers"] = self._encoded_buffers(run_state, is_within_step=is_within_step)
            return {key: _digest(value) for key, value in own.items()}

        digests = self._on_all_ranks("save_checkpoint()", encode)
        if rank := self._collectives.rank:
            own |= {key: type(value)() for key, value in own.items() if digests[rank][key] == digests[0][key]}
        return own

    def find(self, load_dir: str | Path, tag: str | None, *, strict: bool, with_states: bool) -> Loaded | None:
        """Find a checkpoint and the stores that keep its step; None if `tag` is None and `latest` does not exist.

        All ranks must call this; rank 0 reads the files and asks the stores for all ranks. With
        `checkpoint.load_universal` in the config, the file is `latest_universal`, and it must exist, as with DeepSpeed.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or no store keeps its step any more.
            OtherModelError: `strict`, and the step is of a model with other parameters.
            ConfigError: `with_states`, and the optimizer has other parameter groups than that of the checkpoint.
        """
        known = self._collectives.gather_bytes(
            json.dumps([self._store.address, self._store.epoch]).encode(), "load_checkpoint()"
        )
        stores = [StoreAddress(address=address, epoch=epoch) for address, epoch in map(json.loads, known)]
        stores += [StoreAddress(address=address) for address in self._settings.paramserver.peers]

        def search() -> dict[str, Any] | None:
            directory = Path(load_dir).absolute()
            is_universal = self._settings.checkpoint.load_universal
            latest = files.LATEST_UNIVERSAL if is_universal else files.LATEST
            wanted = files.read_latest(directory, latest) if tag is None else files.check_tag(str(tag))
            if wanted is None and is_universal:
                raise CheckpointError(
                    f"checkpoint.load_universal is true, and there is no file {directory / latest}: run python -m "
                    "trainer_client.checkpoint.ds_to_universal, give load_checkpoint(tag=...), or remove the key"
                )
            if wanted is None:
                log.warning(
                    "there is no file %s, so no checkpoint is loaded: give load_checkpoint(tag=...)",
                    directory / latest,
                )
                return None
            place = directory / wanted
            manifest = files.read_manifest(place)
            groups = [state.group for state in self._states]
            source = find_source(manifest, str(place), groups, stores, self._store.credentials, strict=strict)
            return {"path": str(place / files.MANIFEST), "text": manifest.to_json(), "source": source.to_json()}

        found = self._on_rank_0("load_checkpoint()", search)
        if found is None:
            return None
        return self._on_all_ranks_alike("load_checkpoint()", lambda: self._loaded(**found, with_states=with_states))

    def hand_over(self, loaded: Loaded, step: int, *, with_states: bool) -> None:
        """Hand over the values of a checkpoint for the uncommitted `step`, and set the model's buffers.

        All ranks must call this.

        Args:
            with_states: whether the optimizer's states are loaded, too. If not, the optimizer keeps its states.

        Raises:
            StoreError: a store failed.
        """
        source, manifest = loaded.source, loaded.manifest
        # The rank's own store comes first in the list, so that the rank reads from it all elements that it has.
        stores = sorted(source.stores, key=lambda store: store.epoch != self._store.epoch)
        with StoredStep(
            job=manifest.job,
            layout="",
            step=manifest.step,
            stores=stores,
            credentials=self._store.credentials,
            kept=manifest.kept,
        ) as stored_step:
            relayout.replace(
                self._states,
                stored_step,
                fresh=source.fresh,
                missing=source.missing,
                with_states=with_states,
                step=step,
            )
        for state in self._states:
            state.refill()
            note_new_values(state.group.parameters)
        give_buffers(self._user.module, loaded.buffers)

    def _encoded_buffers(self, run_state: bytes, *, is_within_step: bool) -> str:
        """Return all buffers of the model, encoded: those in the run state, and the larger ones as they are now."""
        committed = _buffers_in(run_state)
        larger = self._plain.larger_buffers(committed)
        if larger and is_within_step and self._collectives.rank == 0:
            log.warning(
                "save_checkpoint() within a step: these buffers have the values of this moment, and not those at the "
                "end of the last step, because a commit has no room for them: %s; save between two steps if a forward "
                "changes them",
                ", ".join(larger),
            )
        return client_state.encode({**committed, **larger}).decode()

    def _agree_on(self, tag: str) -> str:
        """Return the tag of rank 0, which all ranks use for the checkpoint. All ranks must call this.

        If the ranks have different tags and `checkpoint.tag_validation` is "Fail", raise ConfigError.
        """
        tags = [given.decode() for given in self._collectives.gather_bytes(tag.encode(), "save_checkpoint()")]
        different = [rank for rank, other in enumerate(tags) if other != tags[0]]
        if different:
            text = f"save_checkpoint(): rank 0 has the tag {tags[0]!r} and rank {different[0]} {tags[different[0]]!r}"
            match self._settings.checkpoint.tag_validation:
                case "Fail":
                    raise ConfigError(f"{text}; checkpoint.tag_validation is 'Fail': give one tag on all ranks")
                case "Warn" if self._collectives.rank == 0:
                    log.warning("%s; that of rank 0 counts", text)
        return tags[0]

    def _write(self, manifest: CheckpointManifest, directory: Path, *, save_latest: bool) -> list[str]:
        """Write the files of a checkpoint, and return the kept step of the checkpoint that it replaces, if any."""
        before: CheckpointManifest | None = None
        with suppress(CheckpointError, OSError):
            before = files.read_manifest(directory)
        replaced = [before.kept] if before is not None and self._retention.was_saved_in(directory, before) else []
        contents = {directory / files.MANIFEST: manifest.to_json()}
        if save_latest:
            contents[files.root_of(directory, manifest.tag) / files.LATEST] = manifest.tag
        try:
            # After an error of this call, the caller makes the stores forget the kept step. So `write_all` leaves no
            # manifest behind that refers to the step.
            files.write_all(contents)
        except OSError:
            files.remove_empty(directory, manifest.tag)
            raise
        for name in replaced:
            self._retention.drop(name)
        self._retention.note(manifest, directory)
        return replaced

    def _forget(self, names: Iterable[str]) -> None:
        """Make this rank's store forget steps. A failure is only logged, because the checkpoint itself is saved."""
        for name in names if self._leads_store else ():
            try:
                self._store.job.forget_step(name)
            except StoreError as error:
                log.warning("the kept step %s is not forgotten: %s", name, error)

    def _loaded(self, *, path: str, text: str, source: Mapping[str, Any], with_states: bool) -> Loaded:
        manifest, found = CheckpointManifest.from_json(text, path), KeptSource.from_json(source)
        rank = self._collectives.rank
        known = rank < len(manifest.run_states)
        state = files.decode_run_state(manifest.run_states[rank if known else 0], path)
        if not known:
            state["random"] = client_state.derived_random_states(state["random"], rank)
        buffers = files.decode_buffers(manifest.buffers_of(rank), path)
        try:
            counts = state["update_counts"]
            # The update count None stands for a parameter that the step does not have. The optimizer states of this
            # parameter stay as they are.
            state["update_counts"] = [
                None if p.fqn not in found.places else 0 if p.fqn in found.fresh else int(counts[found.places[p.fqn]])
                for p in self._user.parameters
            ]
            # If `found.keeps_groups`, the checkpoint has the same parameters as this model. So the names of this
            # model's parameters are right for the parameter groups of the checkpoint.
            names = [p.fqn for p in self._user.parameters]
            state["optimizer"] = groups_of(state, names) if found.keeps_groups else None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: its state of the run does not fit its step: {error!r}") from None
        if with_states and state["optimizer"] is not None:
            self._user.optimizer.check_settings(state["optimizer"])
        own = dict(self._user.module.named_buffers(remove_duplicate=False))
        buffers = {
            name: value
            for name, value in buffers.items()
            if name in own and isinstance(value, torch.Tensor) and own[name].shape == value.shape
        }
        found_names = {*buffers, *(state["extra_states"] or ())}
        if rank == 0 and (left_out := [name for name in self._plain.names if name not in found_names]):
            log.warning("%s does not have these parts of the model, which stay: %s", path, ", ".join(left_out))
        return Loaded(
            path=path,
            manifest=manifest,
            source=found,
            run_state=state,
            client_state=files.decode_user_state(manifest.client_state_of(rank), path),
            buffers=buffers,
        )

    def _on_all_ranks(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Call `act` on every rank, and return all results, which are JSON types. All ranks must call this.

        Raises:
            TrainerClientError, OSError: `act` has failed on this rank.
            CheckpointError: `act` has failed on another rank.
        """
        failure: TrainerClientError | OSError | None = None
        answer: dict[str, Any]
        try:
            answer = {"result": act()}
        except (TrainerClientError, OSError) as error:
            failure, answer = error, {"error": str(error)}
        answers = [json.loads(given) for given in self._collectives.gather_bytes(json.dumps(answer).encode(), what)]
        for rank, other in enumerate(answers):
            if "error" in other:
                raise failure or CheckpointError(f"{what} has failed on rank {rank}: {other['error']}")
        return [other["result"] for other in answers]

    def _on_rank_0(self, what: str, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0, and return its result, which is of JSON types, on every rank. All ranks must call this.

        Raises:
            TrainerClientError, OSError: `act` has failed, on rank 0.
            CheckpointError: `act` has failed, on the other ranks.
        """
        return self._on_all_ranks(what, lambda: act() if self._collectives.rank == 0 else None)[0]

    def _on_all_ranks_alike(self, what: str, act: Callable[[], T]) -> T:
        """Call `act` on every rank, and return this rank's result, which may be of any type. All ranks must call this.

        If `act` has failed on any rank, all ranks raise an error, as in `_on_all_ranks`.
        """
        results: list[T] = []
        self._on_all_ranks(what, lambda: results.append(act()))
        return results[0]


def _buffers_in(run_state: bytes) -> dict[str, torch.Tensor]:
    """Return the model's buffers in the encoded state of a run. In rank 0's state they are inside the entry "model"."""
    state = client_state.decode(run_state)
    buffers: dict[str, torch.Tensor] = (state["model"] or state)["buffers"]
    return buffers


def _digest(value: Any) -> str:
    """Return a text that is the same for equal values, which are JSON types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
