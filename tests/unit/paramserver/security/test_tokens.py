"""The token file decides what a token allows, is replaced as a whole at each change, and contains no token itself."""

from __future__ import annotations

import asyncio
import datetime
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paramserver.cli import app
from paramserver.errors import ConfigError
from paramserver.security.principals import ANYONE, Principal, Role
from paramserver.security.tokens import (
    TokenFile,
    add_token,
    digest,
    read_entries,
    remove_token,
)

SHA = "a" * 64


@pytest.mark.parametrize(
    ("patterns", "job", "allowed"),
    [
        (["bob"], "bob", True),
        (["bob"], "bobby", False),
        (["bob"], "Bob", False),
        (["team-*"], "team-a/../x", True),
        (["team-?"], "team-10", False),
        (["[ab]*", "c"], "c", True),
        (["[ab]*", "c"], "d", False),
        (["*"], "", True),
    ],
)
def test_a_job_token_allows_what_its_patterns_match(patterns: list[str], job: str, allowed: bool) -> None:
    assert Principal(name="t", role=Role.JOB, jobs=tuple(patterns)).allows(job) is allowed
    assert Principal(name="t", role=Role.ADMIN).allows(job) and ANYONE.allows(job)


def test_a_file_is_made_for_its_user_alone_and_holds_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    expires = datetime.datetime(2999, 1, 2, tzinfo=datetime.UTC)
    tokens = [
        add_token(path, "ops", Role.ADMIN),
        add_token(path, "alice@host", Role.JOB, ['a "quoted" \\ *', "ünïcode-\N{SNOWMAN}*", "\U0001f600"], expires),
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(set(tokens)) == 2 and all(len(token) == 43 for token in tokens)
    assert not [token for token in tokens if token in path.read_text()]
    ops, alice = read_entries(path)
    assert (ops.principal, ops.sha256) == (Principal(name="ops", role=Role.ADMIN), digest(tokens[0]))
    assert alice.jobs == ('a "quoted" \\ *', "ünïcode-\N{SNOWMAN}*", "\U0001f600")
    assert (alice.expires, alice.expired, ops.expired) == (expires, False, False)
    found = TokenFile(path)
    assert found.find(tokens[1]) == alice and found.find(tokens[1][:-1]) is None and found.find("") is None


def test_adding_keeps_what_people_wrote_and_removing_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "one", Role.ADMIN)
    path.write_text(path.read_text() + "# ours\n")
    for name in ("two", "three"):
        add_token(path, name, Role.JOB, ["x"])
    assert "# ours" in path.read_text()
    remove_token(path, "two")
    assert [entry.name for entry in read_entries(path)] == ["one", "three"]
    with pytest.raises(ConfigError, match="no token named 'two'"):
        remove_token(path, "two")
    with pytest.raises(ConfigError, match="has a token named 'one' already"):
        add_token(path, "one", Role.ADMIN)
    assert list(tmp_path.iterdir()) == [path]


def test_commands_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    names = [f"t{n}" for n in range(20)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: add_token(path, name, Role.ADMIN), names))
    assert sorted(entry.name for entry in read_entries(path)) == sorted(names)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[token", "is not valid TOML"),
        ("[token]", r"write \[\[token\]\]"),
        ("other = 1", "unknown key 'other'"),
        ("token = [1]", "token 1: the entry"),
        ('[[token]]\nname = "a"', "token 1: sha256: Field required"),
        (
            f'[[token]]\nname = "a"\nsha256 = "{SHA}"\nrole = "root"',
            "token 1: role: Input should be 'admin', 'job' or 'borrower'",
        ),
        (f'[[token]]\nname = "a b"\nsha256 = "{SHA}"\nrole = "admin"', "token 1: name"),
        ('[[token]]\nname = "a"\nsha256 = "secret"\nrole = "admin"', "token 1: sha256"),
        (f'[[token]]\nname = "a"\nsha256 = "{SHA}"\nrole = "job"', "of role job names its jobs"),
        (f'[[token]]\nname = "a"\nsha256 = "{SHA}"\nrole = "admin"\njobs = ["x"]', "of another role none"),
        (f'[[token]]\nname = "a"\nsha256 = "{SHA}"\nrole = "job"\njobs = ["\\u0007"]', "is not printable"),
        (f'[[token]]\nname = "a"\nsha256 = "{SHA}"\nrole = "admin"\nexpires = 2030-01-01T00:00:00', "timezone"),
        (f'[[token]]\nname = "a"\nsha256 = "{SHA}"\nrole = "admin"\ncolour = 1', "token 1: colour: Extra inputs"),
        (2 * f'[[token]]\nname = "a"\nsha256 = "{SHA}"\nrole = "admin"\n', "has 2 tokens with the name a; keep one"),
    ],
)
def test_a_wrong_file_is_refused_by_entry_and_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^token_file: {re.escape(str(path))}.*{named}") as caught:
        TokenFile(path)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_file: cannot read .*none.toml: No such file"):
        TokenFile(tmp_path / "none.toml")


async def test_a_change_is_followed_and_a_broken_or_missing_file_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.security.tokens.FOLLOW_SECONDS", 0.01)
    path = tmp_path / "tokens.toml"
    first = add_token(path, "first", Role.ADMIN)
    tokens = TokenFile(path)
    following = asyncio.ensure_future(tokens.follow())

    async def until(reached: str) -> None:
        while reached not in caplog.text:
            await asyncio.sleep(0.01)
        caplog.clear()

    with caplog.at_level("INFO"):
        second = add_token(path, "second", Role.ADMIN)
        await until("2 tokens are in use")
        assert tokens.find(first) and tokens.find(second)
        good = path.read_text()
        path.write_text("[[token]]\n")
        await until("the tokens before stay in use")
        path.unlink()
        await until("No such file")
        assert tokens.find(first) and tokens.find(second)
        path.write_text(good)
        await until("2 tokens are in use")
        remove_token(path, "first")
        await until("1 tokens are in use")
        assert tokens.find(first) is None and tokens.find(second)
    following.cancel()


def test_the_commands_print_a_token_once(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens.toml")

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["tokens", *arguments])
        return result.exit_code, result.output

    code, token = run("add", path, "--name", "ops", "--admin")
    assert code == 0 and TokenFile(Path(path)).find(token.strip())
    assert run("add", path, "--name", "a", "--job", "a-*", "--job", "b", "--expires", "2020-02-03")[0] == 0
    code, listed = run("list", path)
    assert listed.splitlines() == ["ops: admin (everything), never expires", "a: job (a-*, b), expired"]
    assert token.strip() not in listed
    assert run("remove", path, "--name", "a") == (0, "")
    for wrong in (["add", path, "--name", "b"], ["add", path, "--name", "b", "--admin", "--job", "x"]):
        code, said = run(*wrong)
        assert code == 2 and "one of --admin, --job NAME and --borrow" in said
    assert run("remove", path, "--name", "a")[0] == 2
    assert run("list", str(tmp_path / "none"))[0] == 2
    assert run("add", str(tmp_path / "no" / "t.toml"), "--name", "x", "--admin")[0] == 1
