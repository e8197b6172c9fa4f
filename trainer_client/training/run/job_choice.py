"""The choice of the job of a trained engine: the engine goes on with a stored job, or begins anew in a job of its own.

[Note: which job] If names followed from the order in which engines are made, a script that makes its engines in another
order would give one engine the values of another one. So:

- A script's own loop goes on with the job that the config names. If none is named, with the newest start of `default`.
- A loop of another library (the name `deepspeed` imported as such, as the Trainer of transformers, TRL and Accelerate
  do) counts its own steps from 0. So each start begins anew, unless `paramserver.resume` is written in the config.
- If another engine of this process has the job and is open, the new engine begins anew, in a job beside that one.

An engine that begins anew gets a job with a new name: NAME-DATE-TIME-HEX for a start, and NAME.2, NAME.3 and so on
beside the engine with the job NAME. If there is a NAME.2, no start goes on with NAME or NAME.2 unless its config names
the job, because the start cannot know which of the former engines it is. The former job stays as it is, and one line of
the log says how to go on from its last step.

This module owns the rules and the names. It must never change or delete a stored job.
"""

from __future__ import annotations

import enum
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass

from trainer_client.client.transport.credentials import Credentials
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError, StoreBudgetError, TrainerClientError
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.stored_step import StoreAddress, connect

log = logging.getLogger(__name__)

# The job's name if the config names none and another library's training loop has called `initialize`.
_OF_DEEPSPEED = "deepspeed"
_START = re.compile(r"-(\d{8}-\d{6}-[0-9a-f]{6})")


class Loop(enum.Enum):
    """The owner of the training loop that calls `initialize`: the script, or another library."""

    OWN = "a loop of the script's own"
    DEEPSPEED = "the loop of a program that imports `deepspeed`, which counts its own steps from 0"


_loop: ContextVar[Loop | None] = ContextVar("paramserver_loop", default=None)


@contextmanager
def naming_its_jobs() -> Iterator[None]:
    """Enclose a call of `initialize` by a caller that chooses the name of each start's job itself."""
    token = _loop.set(Loop.OWN)
    try:
        yield
    finally:
        _loop.reset(token)


def _present_loop() -> Loop:
    """Return the owner of the loop that calls. A program that imports `deepspeed` gets a module of this library."""
    stand_in = sys.modules.get("deepspeed")
    by_name = stand_in is not None and stand_in.__name__ == __name__.partition(".")[0]
    return _loop.get() or (Loop.DEEPSPEED if by_name else Loop.OWN)


@contextmanager
def naming_open_engines(address: str, job: str) -> Iterator[None]:
    """Enclose the opening of a job, so that an error about a budget names open engines of this process that use it."""
    try:
        yield
    except StoreBudgetError as error:
        others = [other for place, other in _open if place == address and other != job]
        if not others:
            raise
        raise StoreBudgetError(
            error.code,
            f"{error.message}. Open engines of this process have memory of this store, too, with the jobs "
            f"{', '.join(map(repr, others))}: close those that are not needed any more (engine.close(), or destroy())",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the config and the kind of loop ask for: the name of an engine's job, and whether to go on with it.

    Attributes:
        job: the job of the config. If the config names none, `is_named` is False, and this is the default.
        resume: `paramserver.resume` as the config has it; None: the config does not have the key.
    """

    job: str
    is_named: bool
    resume: str | None
    loop: Loop

    @property
    def base(self) -> str:
        """The name with which the job names of all starts of this config begin."""
        return _OF_DEEPSPEED if self.loop is Loop.DEEPSPEED and not self.is_named else self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenJob:
    """The job of an engine.

    Attributes:
        job: the name of the job.
        resume: the policy with which the job is opened: `auto` goes on with a stored job if there is one, `must` only
            goes on, and `never` only begins anew.
        former: the stored job from whose last step the engine does not go on, although it could; "": there is none.
        why: the reason why the engine does not go on with `former`.
    """

    job: str
    resume: str
    former: str = ""
    former_step: int = 0
    why: str = ""


# The jobs of the open engines of this process, each as (address of the store, job).
_open: list[tuple[str, str]] = []
# The jobs whose weights were loaded into engines without an optimizer, although the models of these engines had values
# of their own. Each is given as (address of the store, job).
_given: list[tuple[str, str]] = []


def is_of_training(address: str, job: str) -> bool:
    """Return whether an engine without an optimizer, whose config names `job`, is a reference of the trained model.

    A reference keeps the values of its own model. An engine is one if an open engine of this process trains the job in
    the store at `address`. In programs that import `deepspeed`, each engine without an optimizer is one, because these
    programs make all their engines from one config.
    """
    return (address, job) in _open or _present_loop() is Loop.DEEPSPEED


def note_stored_values(address: str, job: str, resources: ExitStack) -> None:
    """Take note, until `resources` is closed, that a stored job's values have replaced the own values of a model."""
    entry = (address, job)
    _given.append(entry)
    resources.callback(_given.remove, entry)


def choose_job(
    settings: TrainingConfig, address: str, credentials: Credentials, collectives: Collectives, resources: ExitStack
) -> TrainingConfig:
    """Return the settings with the job of this engine, and the policy to open it with. All ranks must call this.

    Rank 0 decides. If the engine does not go on from a stored step, a line of rank 0's log says so.

    Args:
        resources: closed when the engine is closed, or has ended because the program forgot it.

    Raises:
        ConfigError: another engine of this process has the job, or the config does not say which job to go on with.
        StoreError: the store does not answer.
    """
    section = settings.paramserver
    wish = Wish(
        job=section.job,
        is_named="job" in section.model_fields_set,
        resume=section.resume if "resume" in section.model_fields_set else None,
        loop=_present_loop(),
    )
    failure: TrainerClientError | None = None
    made: dict[str, str | int] = {}
    if collectives.rank == 0:
        try:
            taken = [job for place, job in _open if place == address]
            choice = choose(wish, _stored_steps(address, credentials), taken, _new_name(wish.base))
            _require_no_reference(address, choice.job)
            made = asdict(choice)
        except TrainerClientError as error:
            failure = error
    text = collectives.gather_bytes(json.dumps(made).encode(), "the choice of the job")[0]
    if failure is not None:
        raise failure
    if not json.loads(text):
        raise ConfigError("rank 0 has found no job for this engine: see its message")
    choice = ChosenJob(**json.loads(text))
    if choice.former and collectives.rank == 0:
        log.warning(
            "paramserver: job %r has step %d, and this engine begins anew, as job %r, because %s. That step stays: to "
            'go on from it, write "paramserver": {"job": "%s", "resume": "auto"} into the config, and to go on with '
            "this start later, the other name",
            *(choice.former, choice.former_step, choice.job, choice.why, choice.former),
        )
    entry = (address, choice.job)
    _open.append(entry)
    resources.callback(_open.remove, entry)
    update = {"job": choice.job, "resume": choice.resume}
    return settings.model_copy(update={"paramserver": section.model_copy(update=update)})


def _require_no_reference(address: str, job: str) -> None:
    """Raise ConfigError if an engine without an optimizer that was made before has the weights of a job to train.

    That engine is a reference model which was made from the config of the policy to train. Its own values were replaced
    by those of the job, so it would be no reference.
    """
    if (address, job) in _given:
        raise ConfigError(
            f"an open engine without an optimizer has the weights of job {job!r}, which this engine is about to train: "
            "make this engine before that one, whose model keeps its own values then; or write paramserver.inference "
            "into the config of that one, if it is meant to have the weights of the job"
        )


def choose(wish: Wish, stored: Mapping[str, int], taken: list[str], new_name: str) -> ChosenJob:
    """Return the job of an engine; see [Note: which job].

    Args:
        wish: the wishes of the config and of the loop.
        stored: the newest committed step of each job of the store.
        taken: the jobs of this process's engines that are not closed, the oldest first.
        new_name: a name that no start has.

    Raises:
        ConfigError: the config has to name another job.
    """
    starts = [job for job in stored if job == wish.base or _start_of(job, wish.base)]
    starts.sort(key=lambda job: _start_of(job, wish.base))
    trained = [job for job in starts if stored[job] > 0]
    newest = trained[-1] if trained else wish.base
    former = {"former": newest, "former_step": stored[newest]} if trained else {}
    beside = [job for job in taken if job == wish.base or _start_of(job, wish.base)]
    if beside and wish.resume != "never":
        return _beside(wish, beside[0], {*stored, *taken})
    if wish.resume == "anew" or (wish.loop is Loop.DEEPSPEED and wish.resume is None):
        why = 'paramserver.resume is "anew"' if wish.resume == "anew" else f"this is {wish.loop.value}"
        return _anew(wish, stored, new_name, former, why)
    if wish.is_named:
        return ChosenJob(job=wish.job, resume=wish.resume or "auto")
    others = [job for job in stored if job.startswith(f"{newest}.") and stored[job] > 0]
    if others:
        why = f"the last start had several engines without paramserver.job ({', '.join([newest, *sorted(others)])})"
        if wish.resume in ("auto", "must"):
            raise ConfigError(
                f"paramserver.resume is {wish.resume!r}, and {why}, so which of these jobs this engine goes on with is "
                "not known: write paramserver.job for each engine"
            )
        if wish.resume is None:
            return _anew(wish, stored, new_name, former, why)
    return ChosenJob(job=wish.base if wish.resume == "never" else newest, resume=wish.resume or "auto")


def _beside(wish: Wish, first: str, known: set[str]) -> ChosenJob:
    """Return the job of a further engine in a process whose open engine has the job `first`: FIRST.2, FIRST.3 ...

    Args:
        wish: the wishes of the config and of the loop.
        first: the name of the open engine's job.
        known: the names of all stored and open jobs. The new job gets none of these names.

    Raises:
        ConfigError: the config names the job for a script's own loop, or asks to go on with it ("must").
    """
    if (wish.is_named and wish.loop is Loop.OWN) or wish.resume == "must":
        raise ConfigError(
            f"an engine of this process has job {first!r} and is open: close it first (engine.close(), or destroy()), "
            "or write another paramserver.job for this engine"
        )
    number = 2
    while f"{first}.{number}" in known:
        number += 1
    log.warning(
        "paramserver: another engine of this process has job %r and is open, so this one begins anew, as job %r. Write "
        "paramserver.job for each of them, so that a later start can go on with both",
        *(first, f"{first}.{number}"),
    )
    return ChosenJob(job=f"{first}.{number}", resume="never")


def _anew(wish: Wish, stored: Mapping[str, int], new_name: str, former: Mapping[str, object], why: str) -> ChosenJob:
    job = new_name if wish.base in stored else wish.base
    return ChosenJob(job=job, resume="never", why=why, **former)  # type: ignore[arg-type]


def _start_of(job: str, base: str) -> str:
    """Return the date and the digits in the name of a start of `base`; "" for `base` itself, and for other jobs."""
    found = _START.fullmatch(job.removeprefix(base)) if job.startswith(base) else None
    return "" if found is None else found[1]


def _new_name(base: str) -> str:
    return f"{base}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _stored_steps(address: str, credentials: Credentials) -> dict[str, int]:
    """Return the newest committed step of each job of the store that this client may read. It can raise StoreError."""
    with connect(StoreAddress(address=address), credentials) as client:
        return {job.name: job.step for job in client.list_jobs() if job.step is not None}
