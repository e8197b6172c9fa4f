"""The token file, which holds the hash, the name and the rights of each token. A token is shown once, when it is made.

This module owns the file's format. It must never store, print or log a token anywhere else.
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
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from paramserver.contract.documents import parse_toml
from paramserver.errors import ConfigError
from paramserver.process.background import repeat
from paramserver.security.files import fingerprint, replace_file, target_of
from paramserver.security.principals import Principal, Role

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
# The daemon checks at this interval of seconds whether the token file has changed.
FOLLOW_SECONDS = 1.0

_HEADER = "# Who may use the store: `paramserver tokens`. Tokens are kept as hashes only.\n"


class TokenEntry(BaseModel):
    """One entry of the token file: a token's hash, name, rights and expiry date."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    role: Role
    jobs: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # Whether a token of role job may also delete the jobs that it names.
    delete: bool = False
    expires: AwareDatetime | None = None

    @model_validator(mode="after")
    def _check_jobs(self) -> TokenEntry:
        if (self.role is Role.JOB) != bool(self.jobs):
            raise ValueError("a token of role job names its jobs, and one of another role none")
        if self.role is not Role.JOB and self.delete:
            raise ValueError("delete is for tokens of role job: an admin may delete every job, and a borrower none")
        if unprintable := [pattern for pattern in self.jobs if not pattern.isprintable()]:
            raise ValueError(f"the job pattern {unprintable[0]!r} is not printable, so no job has such a name")
        return self

    @property
    def expired(self) -> bool:
        """Whether the token has expired."""
        return self.expires is not None and time.time() >= self.expires.timestamp()

    @cached_property
    def principal(self) -> Principal:
        """The principal of calls that carry the token."""
        return Principal(name=self.name, role=self.role, jobs=self.jobs, may_delete=self.delete)

    def to_toml(self) -> str:
        """Return the entry in the form that it has in the file."""
        lines = ["[[token]]", f'name = "{self.name}"', f'sha256 = "{self.sha256}"', f'role = "{self.role}"']
        if self.jobs:
            # The names are printable strings, which JSON and TOML write in the same way. So the JSON list is valid
            # TOML, too.
            lines.append(f"jobs = {json.dumps(self.jobs, ensure_ascii=False)}")
        if self.delete:
            lines.append("delete = true")
        if self.expires is not None:
            lines.append(f"expires = {self.expires.isoformat()}")
        return "\n".join(lines) + "\n"


def digest(token: str) -> str:
    """Return the SHA-256 hash of a token, which the file holds in place of the token.

    A plain hash is enough. A slow, salted hash protects passwords, which can be guessed; a token has 256 random bits.
    The dict look-up of the hash takes a time that depends on the hash, but an attacker learns nothing from that time,
    because a token with a chosen hash cannot be made.
    """
    return hashlib.sha256(token.encode()).hexdigest()


def read_entries(path: Path) -> list[TokenEntry]:
    """Return the tokens of a file.

    Raises:
        ConfigError: the file cannot be read, an entry is wrong, or a name or a token occurs twice.
    """
    try:
        content = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"token_file: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
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


def _entry(path: Path, number: int, table: object) -> TokenEntry:
    try:
        return TokenEntry.model_validate(table)
    except ValidationError as error:
        detail = error.errors(include_input=False)[0]
        field = ".".join(map(str, detail["loc"])) or "the entry"
        raise ConfigError(f"token_file: {path}, token {number}: {field}: {detail['msg']}") from error


# The daemon uses the following class, and operators' commands do not.


class TokenFile:
    """The tokens that are valid now, which the gate looks up. `follow` loads the file again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. It raises ConfigError like `read_entries`."""
        self._path = path
        # The fingerprint is taken before the token file is read. So if the file changes between the two, the first call
        # of `_look` finds a changed fingerprint and reads the file again.
        self._seen = fingerprint(path)
        # The last logged message about a changed token file that cannot be used, so that each message is logged once.
        self._problem = ""
        self._entries = {entry.sha256: entry for entry in read_entries(path)}

    def find(self, token: str) -> TokenEntry | None:
        """Return the entry of a token, or None if the file has none."""
        return self._entries.get(digest(token))

    async def follow(self) -> None:
        """Load the file again each time that it changes, until this task is cancelled."""
        await repeat("a look at the token file", FOLLOW_SECONDS, lambda: asyncio.to_thread(self._look))

    def _look(self) -> None:
        now = fingerprint(self._path)
        if now == self._seen:
            return
        try:
            entries = read_entries(self._path)
        except ConfigError as error:
            # `_seen` keeps the fingerprint from before the change, so the next call of `_look` reads the token file
            # again. If `_seen` changed now, a file that cannot be read for a moment would not be read again, and a
            # token that was removed would stay valid.
            if self._problem != (problem := str(error)):
                log.error("the changed token file cannot be used, the tokens before stay in use: %s", problem)
                self._problem = problem
            return
        self._seen, self._problem = now, ""
        self._entries = {entry.sha256: entry for entry in entries}
        log.info("the token file has changed: %d tokens are in use", len(entries))


# The operators' commands use the following functions, and the daemon does not.


def add_token(
    path: Path,
    name: str,
    role: Role,
    jobs: Iterable[str] = (),
    expires: datetime.datetime | None = None,
    *,
    delete: bool = False,
) -> str:
    """Add a new token to a file, which is made (mode 0600) if it does not exist, and return the token.

    The token is stored nowhere. Its holder may use `jobs` (names or patterns). With `delete` it may also delete them.

    Raises:
        ConfigError: the name is taken or not allowed, or the file cannot be used.
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
    """Remove a token from a file. Comments in the file are lost.

    Raises:
        ConfigError: the file has no token of that name, or cannot be used.
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
    """Lock the file's directory, so that two commands at once do not lose each other's change.

    The file itself cannot be locked, because each command replaces it. If `path` is a symbolic link, the directory is
    that of the file which the link names, because another command may name the file itself.
    """
    descriptor = os.open(target_of(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
