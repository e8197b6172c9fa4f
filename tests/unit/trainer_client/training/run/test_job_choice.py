"""The job that an engine has, by the config, the loop that drives it, the store, and the engines beside it."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.errors import ConfigError
from trainer_client.training.run.job_choice import ChosenJob, Loop, Wish, choose

OLD, NEW = "20261127-101500-aaaaaa", "20261128-101500-bbbbbb"
FRESH = "20261129-000000-cccccc"


def chosen(stored: dict[str, int], taken: list[str] | None = None, **wish: Any) -> ChosenJob:
    fields: dict[str, Any] = {"job": "default", "is_named": "job" in wish, "resume": None, "loop": Loop.OWN, **wish}
    given = Wish(**fields)
    return choose(given, stored, taken or [], f"{given.base}-{FRESH}")


def test_a_loop_of_ones_own_goes_on_with_its_newest_start() -> None:
    assert chosen({}) == ChosenJob(job="default", resume="auto")
    assert chosen({"default": 4, "other": 9, "deepspeed": 9}).job == "default"
    # A start that has made no step is none to go on with, and neither is an engine beside another one.
    stored = {"default": 4, f"default-{OLD}": 7, f"default-{NEW}": 0, "default-2": 9, f"defaults-{NEW}": 9}
    assert chosen(stored).job == f"default-{OLD}"
    assert chosen(stored, resume="must") == ChosenJob(job=f"default-{OLD}", resume="must")
    assert chosen(stored, resume="never") == ChosenJob(job="default", resume="never")
    assert chosen(stored, job="default").job == "default"


@pytest.mark.parametrize("wish", [{"loop": Loop.DEEPSPEED}, {"resume": "anew", "job": "deepspeed"}])
def test_a_start_that_begins_anew_leaves_what_is_there(wish: dict[str, Any]) -> None:
    assert chosen({"default": 3}, **wish) == ChosenJob(job="deepspeed", resume="never", why=chosen({}, **wish).why)
    found = chosen({"deepspeed": 3, f"deepspeed-{OLD}": 8, f"deepspeed-{NEW}": 0}, **wish)
    assert (found.job, found.resume) == (f"deepspeed-{FRESH}", "never")
    assert (found.former, found.former_step) == (f"deepspeed-{OLD}", 8)


def test_another_librarys_loop_goes_on_where_the_config_says_so() -> None:
    stored = {"deepspeed": 3, f"deepspeed-{OLD}": 8, "mine": 5}
    assert chosen(stored, loop=Loop.DEEPSPEED, resume="auto").job == f"deepspeed-{OLD}"
    assert chosen(stored, loop=Loop.DEEPSPEED, resume="auto", job="deepspeed").job == "deepspeed"
    assert chosen(stored, loop=Loop.DEEPSPEED, resume="must", job="mine") == ChosenJob(job="mine", resume="must")
    # A name alone does not say to go on.
    assert chosen(stored, loop=Loop.DEEPSPEED, job="mine").job == f"mine-{FRESH}"


def test_an_engine_beside_another_one_begins_anew() -> None:
    assert chosen({"default": 4}, ["default"]) == ChosenJob(job="default.2", resume="never")
    taken = [f"default-{OLD}", f"default-{OLD}.2"]
    assert chosen({f"default-{OLD}.3": 1}, taken).job == f"default-{OLD}.4"
    assert chosen({}, ["deepspeed"], loop=Loop.DEEPSPEED, resume="auto").job == "deepspeed.2"
    assert chosen({}, ["mine"], loop=Loop.DEEPSPEED, job="mine").job == "mine.2"
    for wish in ({"job": "mine"}, {"job": "mine", "resume": "must"}, {"job": "mine", "resume": "anew"}):
        with pytest.raises(ConfigError, match=r"an engine of this process has job 'mine' and is open: close it first"):
            chosen({"mine": 4}, ["mine"], **wish)


def test_of_several_engines_without_a_name_none_is_gone_on_with() -> None:
    """In the order of their creation, a script that makes them in another order would swap their values."""
    stored = {"default": 4, "default.2": 4}
    found = chosen(stored)
    assert (found.job, found.former) == (f"default-{FRESH}", "default")
    assert "the last start had several engines without paramserver.job (default, default.2)" in found.why
    with pytest.raises(
        ConfigError, match=r"resume is 'auto', and the last start had several .*: write paramserver.job"
    ):
        chosen(stored, resume="auto")
    assert chosen(stored, job="default.2").job == "default.2"
    # The next start has one engine again.
    assert chosen(stored | {f"default-{NEW}": 2}).job == f"default-{NEW}"
