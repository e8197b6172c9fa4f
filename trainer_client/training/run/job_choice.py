"""The choice of the job that a trained engine has: it goes on with a stored one, or begins anew in a job of its own.

[Note: which job] A name that follows from an order of creation would give one engine the values of another one where a
script makes its engines in another order. So:

- A loop of one's own goes on with the job that the config names, else with its newest start of the job `default`.
- A loop of another library (the name `deepspeed` imported as such, as the Trainer of transformers, TRL and Accelerate
  do) counts its own steps from 0. So each start begins anew, unless `paramserver.resume` is written in the config.
- Where another engine of this process has the job and is open, an engine begins anew beside it.

What begins anew gets a new name: NAME-DATE-TIME-HEX for a start, and NAME.2, NAME.3 and so on beside the engine with
NAME. No start goes on with the second kind by itself, nor with NAME when there are such, because it cannot know which
of the engines it is. The former job stays as it is, and one line of the log says how to go on from its last step.

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

# The job of starts by another library's loop whose config names none.
_OF_DEEPSPEED = "deepspeed"
_START = re.compile(r"-(\d{8}-\d{6}-[0-9a-f]{6})")


class Loop(enum.Enum):
    """Whose training loop calls `initialize`."""

    OWN = "a loop of the script's own"
    DEEPSPEED = "the loop of a program that imports `deepspeed`, which counts its own steps from 0"


_loop: ContextVar[Loop | None] = ContextVar("paramserver_loop", default=None)


@contextmanager
def naming_its_jobs() -> Iterator[None]:
    """Enclose a call of `initialize` by a face that names the job of each start itself."""
    token = _loop.set(Loop.OWN)
    try:
        yield
    finally:
        _loop.reset(token)


def _present_loop() -> Loop:
    """Return whose loop calls now. A module of this library stands for `deepspeed` once a program has imported that."""
    stand_in = sys.modules.get("deepspeed")
    by_name = stand_in is not None and stand_in.__name__ == __name__.partition(".")[0]
    return _loop.get() or (Loop.DEEPSPEED if by_name else Loop.OWN)


@contextmanager
def naming_open_engines(address: str, job: str) -> Iterator[None]:
    """Enclose the opening of a job: an error about a budget names the open engines of this process that use it, too."""
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
    """What the config and the loop say.

    Attributes:
        job: the job of the config, which is the default if it is not `is_named`.
        resume: `paramserver.resume`, as it is written; None: it is not.
    """

    job: str
    is_named: bool
    resume: str | None
    loop: Loop

    @property
    def base(self) -> str:
        """The name that the names of all starts begin with."""
        return _OF_DEEPSPEED if self.loop is Loop.DEEPSPEED and not self.is_named else self.job


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenJob:
    """The job of an engine.

    Attributes:
        job: its name.
        resume: the policy with which it is opened: `auto`, `must` or `never`.
        former: the job whose last step is not gone on from, "" if there is none; and that step.
        why: why it is not.
    """

    job: str
    resume: str
    former: str = ""
    former_step: int = 0
    why: str = ""


# The jobs of the open engines of this process, with the store's address.
_open: list[tuple[str, str]] = []
# The jobs whose weights open engines without an optimizer have, although their models had values of their own.
_given: list[tuple[str, str]] = []


def is_of_training(address: str, job: str) -> bool:
    """Return whether a config that names a job means the training of it, also for an engine that trains nothing.

    That is so if an open engine of this process trains the job of the store at `address`, and in programs that import
    `deepspeed`, which make all their engines of one config.
    """
    return (address, job) in _open or _present_loop() is Loop.DEEPSPEED


def note_stored_values(address: str, job: str, resources: ExitStack) -> None:
    """Take note that a model which had values has got those of a stored job instead, until `resources` is closed."""
    entry = (address, job)
    _given.append(entry)
    resources.callback(_given.remove, entry)


def choose_job(
    settings: TrainingConfig, address: str, credentials: Credentials, collectives: Collectives, resources: ExitStack
) -> TrainingConfig:
    """Return the settings with the job of this engine, and with how it is opened. All ranks must call this.

    Rank 0 decides, and says in one line of its log if a stored step is not gone on from.

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

    It is a reference model that was made from the config of this policy, and has lost its own values.
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
        wish: what the config and the loop say.
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
    """Return the job of an engine beside the one with the job `first`."""
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
    """Return the date and the digits in the name of a start; "" for the base itself, and for other jobs."""
    found = _START.fullmatch(job.removeprefix(base)) if job.startswith(base) else None
    return "" if found is None else found[1]


def _new_name(base: str) -> str:
    return f"{base}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _stored_steps(address: str, credentials: Credentials) -> dict[str, int]:
    """Return the newest committed step of each job of the store that this client may read. It can raise StoreError."""
    with connect(StoreAddress(address=address), credentials) as client:
        return {job.name: job.step for job in client.list_jobs() if job.step is not None}
