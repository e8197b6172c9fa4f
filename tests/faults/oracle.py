"""The oracle: the steps at which a job may be after a crash, and the bytes of each step.

It derives the steps from the worker's announcements before and after each act. It imports nothing of the engine, and
computes the bytes itself.
"""

from __future__ import annotations

import enum
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field

from tests.faults.jobs import JobShape, State, after_update, initial, updates

CACHED_STATES = 24


class Act(enum.Enum):
    """The acts that a worker announces: before (`COMMITS`) and after (`COMMITTED`) each of them."""

    TRAINING = "is training"
    COMMITS = "commits"
    COMMITTED = "committed"
    ROLLS_BACK = "rolls back"
    ROLLED_BACK = "rolled back"
    DELETES = "deletes"
    DELETED = "deleted"
    KEEPS = "keeps"
    KEPT = "kept"
    FORGETS = "forgets"
    FORGOT = "forgot"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One line from a worker.

    Attributes:
        salt: the number from which the step's gradients are drawn.
        settled: the newest step that all ranks have committed, as the worker tells the engine.
        durable: the newest durable step after a commit; None: there is none.
        name: the name of a kept step.
        text: the message of a refusal or failure.
    """

    act: Act
    job: str = ""
    step: int = 0
    salt: int = 0
    settled: int = 0
    durable: int | None = None
    name: str = ""
    text: str = ""

    def dump(self) -> str:
        """Return the announcement as one line of JSON."""
        return json.dumps(asdict(self) | {"act": self.act.value})

    @classmethod
    def load(cls, line: str) -> Announcement:
        """Return the announcement of which `dump` made this line."""
        values = json.loads(line)
        return cls(**values | {"act": Act(values["act"])})


@dataclass(slots=True)
class History:
    """The steps of one job, as its worker announced them."""

    shape: JobShape
    # The salt of each step. A roll-back removes the salts of the steps that it discards.
    path: list[int] = field(default_factory=list)
    # The newest step that the worker knows as committed.
    newest: int | None = None
    # The newest step after a crash is one from `low` to `high`. If `low` is None, the job may be gone. If `high` is
    # None, the job must be gone.
    low: int | None = None
    high: int | None = None
    # Each commit after this step was made while other ranks were one step behind, so the step before it is retained.
    anchor: int = 0
    # The salts up to each kept step, by its name.
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # The kept steps that may be there after a crash, and those that may be gone.
    coming: dict[str, tuple[int, ...]] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)

    def allowed(self) -> set[int | None]:
        """Return the steps that may be the newest one after a crash. None is among them if the job may be gone."""
        if self.high is None:
            return {None}
        every = self.shape.every_steps
        steps = range(self.low or 0, self.high + 1)
        return {s for s in steps if s % every == 0} | ({None} if self.low is None else set())

    def must_retain(self, newest: int) -> set[int]:
        """Return the steps that the engine must retain if `newest` is the newest one.

        A step is retained until all ranks have committed the next one.
        """
        if self.shape.every_steps != 1 or newest - 1 < self.anchor:
            return {newest}
        return {newest - 1, newest}

    def hear(self, said: Announcement) -> None:
        """Update the history by an announcement.

        Raises:
            AssertionError: the engine promises that this cannot happen.
        """
        every = self.shape.every_steps
        step = said.step
        if said.act is Act.COMMITS:
            assert step == (0 if self.newest is None else self.newest + 1), f"{said} after step {self.newest}"
            self.path[step:] = [said.salt]
            if step in (0, said.settled):
                self.anchor = step
            if every and step % every == 0:
                self.high = step
        elif said.act is Act.COMMITTED:
            assert every != 1 or said.durable == step, f"{said}: durability is 'step'"
            self.newest = step
            if said.durable is not None:
                self.low = said.durable
        elif said.act is Act.ROLLS_BACK:
            self.anchor = step
            self.low = step if every else None
        elif said.act is Act.ROLLED_BACK:
            del self.path[step + 1 :]
            self.newest = step
            self.high = step if every else None
        elif said.act is Act.DELETES:
            self.low = None
            self.going |= self.kept.keys()
        elif said.act is Act.DELETED:
            self.set_to(None, [])
            self.set_kept([])
        else:
            self._hear_of_kept(said)

    def _hear_of_kept(self, said: Announcement) -> None:
        """Update the kept steps by an announcement."""
        if said.act is Act.KEEPS:
            self.coming[said.name] = tuple(self.path[: said.step + 1])
        elif said.act is Act.KEPT:
            self.kept[said.name] = self.coming.pop(said.name)
        elif said.act is Act.FORGETS:
            self.going.add(said.name)
        elif said.act is Act.FORGOT:
            self.going.remove(said.name)
            del self.kept[said.name]

    def wrong_kept(self, found: Collection[str]) -> str | None:
        """Return what is wrong with the names of the kept steps that were found after a crash; None if nothing is."""
        lost = self.kept.keys() - self.going - set(found)
        unknown = set(found) - self.kept.keys() - self.coming.keys()
        return f"has lost {sorted(lost)} and must not have {sorted(unknown)}" if lost or unknown else None

    def set_kept(self, found: Collection[str]) -> None:
        """Set the kept steps to those that were found after a crash."""
        self.kept = {name: path for name, path in (self.kept | self.coming).items() if name in found}
        self.coming, self.going = {}, set()

    def set_to(self, newest: int | None, retained: Iterable[int]) -> None:
        """Set the history to the state that was found after a crash."""
        del self.path[0 if newest is None else newest + 1 :]
        self.newest = self.low = self.high = newest
        self.anchor = min(retained, default=0)


class Oracle:
    """The histories and the expected bytes of all jobs in one state directory."""

    def __init__(self, shapes: Iterable[JobShape]) -> None:
        self.jobs = {shape.name: History(shape) for shape in shapes}
        self.commits = 0
        self._states: OrderedDict[tuple[str, tuple[int, ...]], dict[str, State]] = OrderedDict()

    def hear(self, said: Announcement) -> None:
        """Update the job's history by an announcement; see History.hear."""
        if said.job:
            self.jobs[said.job].hear(said)
        self.commits += said.act is Act.COMMITTED

    def states(self, job: str, step: int) -> dict[str, State]:
        """Return the values of every group and kind at a step."""
        return self.states_after(job, tuple(self.jobs[job].path[: step + 1]))

    def states_after(self, job: str, path: tuple[int, ...]) -> dict[str, State]:
        """Return the values of every group and kind after the steps with these salts."""
        known = len(path)
        while known and (job, path[:known]) not in self._states:
            known -= 1
        for s in range(known, len(path)):
            before = self._states[job, path[:s]] if s else {}
            self._states[job, path[: s + 1]] = _advance(self.jobs[job].shape, before, s, path[s])
            while len(self._states) > CACHED_STATES:
                self._states.popitem(last=False)
        self._states.move_to_end((job, path))
        return self._states[job, path]

    def expected(self, job: str, step: int, group: str, kind: str) -> bytes:
        """Return the bytes of a slab at a step."""
        return self.states(job, step)[group][kind].tobytes()

    def prepare(self) -> None:
        """Compute the newest possible states now, so that processes forked from this one need not compute them."""
        for name, history in self.jobs.items():
            if history.high is not None:
                self.states(name, history.high)


def _advance(shape: JobShape, before: dict[str, State], step: int, salt: int) -> dict[str, State]:
    if step == 0:
        return {group: initial(shape, group, salt) for group in shape.groups}
    updated = updates(shape, salt)
    return {
        group: after_update(shape, group, state, salt) if group in updated else state for group, state in before.items()
    }
