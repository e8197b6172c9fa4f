"""The token file: who may do what. Knows the tokens' hashes only; a token is shown once, when it is made.

Owns the file's format. Must never hold, print or log a token anywhere else.
"""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from paramserver.errors import ConfigError
from paramserver.process.background import repeat
from paramserver.security.files import fingerprint, replace_file
from paramserver.security.principals import Principal, Role

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
# How soon a change of the file holds.
FOLLOW_SECONDS = 1.0

_HEADER = "# Who may use the store: `paramserver tokens`. Tokens are kept as hashes only.\n"


class Entry(BaseModel):
    """One token of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    role: Role
    jobs: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # Of a token of role job: whether it may delete its jobs.
    delete: bool = False
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _check_jobs(self) -> Entry:
        if (self.role is Role.JOB) != bool(self.jobs):
            raise ValueError("a token of role job names its jobs, and one of role admin none")
        if self.role is Role.ADMIN and self.delete:
            raise ValueError("delete is for tokens of role job: one of role admin may delete every job")
        if unprintable := [pattern for pattern in self.jobs if not pattern.isprintable()]:
            raise ValueError(f"the job pattern {unprintable[0]!r} is not printable, so no job has such a name")
        return self

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and time.time() >= self.expires.timestamp()

    @cached_property
    def principal(self) -> Principal:
        """Whom the token stands for."""
        return Principal(name=self.name, role=self.role, jobs=self.jobs, may_delete=self.delete)

    def to_toml(self) -> str:
        """The entry as it stands in the file."""
        lines = ["[[token]]", f'name = "{self.name}"', f'sha256 = "{self.sha256}"', f'role = "{self.role}"']
        if self.jobs:
            # JSON's strings are TOML's, as long as they are printable.
            lines.append(f"jobs = {json.dumps(self.jobs, ensure_ascii=False)}")
        if self.delete:
            lines.append("delete = true")
        if self.expires is not None:
            lines.append(f"expires = {self.expires.isoformat()}")
        return "\n".join(lines) + "\n"


def digest(token: str) -> str:
    """What the file holds of a token.

    A plain hash is enough: a token has 256 random bits, so there is nothing to guess that a slow, salted hash (for
    passwords, which people choose) would protect. That the hash is then looked up in a dict, in a time that depends on
    it, tells nothing either: nobody can choose a token by the digits of its hash.
    """
    return hashlib.sha256(token.encode()).hexdigest()


def read_entries(path: Path) -> list[Entry]:
    """The tokens of a file.

    Raises:
        ConfigError: it cannot be read; an entry is wrong; a name or a token is there twice.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"token_file: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file: {path} is not valid TOML: {error}") from error
    if unknown := content.keys() - {"token"}:
        raise ConfigError(f"token_file: {path} has the unknown key {min(unknown)!r}; it consists of [[token]] tables")
    tables = content.get("token", [])
    if not isinstance(tables, list):
        raise ConfigError(f"token_file: {path}: write [[token]], with two brackets, above each token")
    entries = [_entry(path, number, table) for number, table in enumerate(tables, start=1)]
    for field in ("name", "sha256"):
        (value, times), *_ = Counter(getattr(entry, field) for entry in entries).most_common(1) or [("", 0)]
        if times > 1:
            raise ConfigError(f"token_file: {path} has {times} tokens with the {field} {value}; keep one")
    return entries


def _entry(path: Path, number: int, table: object) -> Entry:
    try:
        return Entry.model_validate(table)
    except ValidationError as error:
        detail = error.errors(include_input=False)[0]
        field = ".".join(map(str, detail["loc"])) or "the entry"
        raise ConfigError(f"token_file: {path}, token {number}: {field}: {detail['msg']}") from error


# --- the daemon's side


class TokenFile:
    """The tokens that count now; `follow` takes changes of the file up."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError, see `read_entries`."""
        self._path = path
        # Before it is read: a change in between is seen by the first look.
        self._seen = fingerprint(path)
        # What was logged last about a changed file that cannot be used.
        self._problem = ""
        self._entries = {entry.sha256: entry for entry in read_entries(path)}

    def find(self, token: str) -> Entry | None:
        """The entry of a token, if there is one."""
        return self._entries.get(digest(token))

    async def follow(self) -> None:
        """Take changes of the file up. Runs until it is cancelled."""
        await repeat("a look at the token file", FOLLOW_SECONDS, lambda: asyncio.to_thread(self._look))

    def _look(self) -> None:
        now = fingerprint(self._path)
        if now == self._seen:
            return
        try:
            entries = read_entries(self._path)
        except ConfigError as error:
            # It is read again at the next look: a token that was removed must not stay in use for good because the
            # file could not be read for a moment.
            if self._problem != (problem := str(error)):
                log.error("the changed token file cannot be used, the tokens before stay in use: %s", problem)
                self._problem = problem
            return
        self._seen, self._problem = now, ""
        self._entries = {entry.sha256: entry for entry in entries}
        log.info("the token file has changed: %d tokens are in use", len(entries))


# --- the operator's side


def add_token(
    path: Path,
    name: str,
    role: Role,
    jobs: Iterable[str] = (),
    expires: datetime.datetime | None = None,
    *,
    delete: bool = False,
) -> str:
    """Adds a token to a file, which is made if it is not there (mode 0600); returns the token, which is kept nowhere.

    Raises:
        ConfigError: the name is taken or not possible, or the file cannot be used.
        OSError: the file cannot be written.
    """
    token = secrets.token_urlsafe(TOKEN_BYTES)
    fields = {
        "name": name,
        "sha256": digest(token),
        "role": role,
        "jobs": tuple(jobs),
        "delete": delete,
        "expires": expires,
    }
    with _alone(path):
        entries = read_entries(path) if path.exists() else []
        if any(entry.name == name for entry in entries):
            raise ConfigError(f"{path} has a token named {name!r} already; remove that one, or choose another name")
        added = _entry(path, len(entries) + 1, fields)
        text = path.read_text(encoding="utf-8").rstrip("\n") + "\n" if entries else _HEADER
        replace_file(path, f"{text}\n{added.to_toml()}".encode(), mode=0o600)
    return token


def remove_token(path: Path, name: str) -> None:
    """Removes a token from a file. Comments in it are not kept.

    Raises:
        ConfigError: there is none of that name, or the file cannot be used.
        OSError: the file cannot be written.
    """
    with _alone(path):
        entries = read_entries(path)
        left = [entry for entry in entries if entry.name != name]
        if len(left) == len(entries):
            raise ConfigError(f"{path} has no token named {name!r}; `paramserver tokens list` shows those that it has")
        replace_file(path, "\n".join([_HEADER, *(entry.to_toml() for entry in left)]).encode(), mode=0o600)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps two commands from losing each other's change; the file itself is replaced, so its directory is locked."""
    descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
