"""The configuration is read anew while the daemon runs: the newest one counts, and a wrong one changes nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from paramserver.config import DaemonConfig
from paramserver.errors import ConfigError
from paramserver.security.quotas import Quotas
from paramserver.services.configuration import Configuration
from storage.base.errors import BudgetExceededError, ConflictError


def config(sessions: int, **keys: Any) -> DaemonConfig:
    """Return a configuration with a quota of sessions."""
    required = {"state_dir": Path("state"), "host_budget": "1GiB", "nvme_budget": "1GiB"}
    return DaemonConfig.model_validate(required | {"quotas": {"default": {"sessions": sessions}}} | keys)


def carries_anything(_: DaemonConfig) -> None:
    """Accept a configuration, as a daemon without jobs does."""


def lends_nothing(_: DaemonConfig) -> None:
    """Accept a configuration, as a daemon without loans does."""


async def test_what_is_lent_counts_at_once() -> None:
    lent: list[int] = []
    first = config(1, lend_budget="4MiB")
    changed = config(1, lend_budget="1MiB", lend_per_borrower="1MiB")
    configuration = Configuration(
        first, lambda: changed, Quotas(first.quotas), carries_anything, lambda present: lent.append(present.lend_budget)
    )
    assert await configuration.reload() == (["lend_budget", "lend_per_borrower"], [])
    assert lent == [1 << 20] and configuration.present.lend_budget == 1 << 20


async def test_quotas_count_at_once_and_other_keys_wait_for_a_restart() -> None:
    first = config(1)
    quotas = Quotas(first.quotas)
    configuration = Configuration(first, lambda: config(2, nvme_budget="2GiB"), quotas, carries_anything, lends_nothing)
    assert await configuration.reload() == (["quotas"], ["nvme_budget"])
    assert quotas.of("job").sessions == 2 and configuration.present.quotas.default.sessions == 2
    assert configuration.present.nvme_budget == 1 << 30
    assert await configuration.reload() == ([], ["nvme_budget"])


async def test_a_configuration_that_cannot_be_used_changes_nothing() -> None:
    def unusable() -> DaemonConfig:
        raise ConfigError("bad configuration: quotas.default.sessions = 'many'")

    first = config(1)
    quotas = Quotas(first.quotas)
    with pytest.raises(ConflictError, match="stays as it is: bad configuration: quotas"):
        await Configuration(first, unusable, quotas, carries_anything, lends_nothing).reload()
    assert quotas.of("job").sessions == 1


async def test_budgets_that_are_too_small_are_refused_and_others_are_not_looked_at() -> None:
    def refuse(changed: DaemonConfig) -> None:
        raise BudgetExceededError(f"nvme_budget {int(changed.nvme_budget)} is too small")

    first = config(1)
    quotas = Quotas(first.quotas)
    smaller = Configuration(first, lambda: config(2, nvme_budget="1MiB"), quotas, refuse, lends_nothing)
    with pytest.raises(ConflictError, match="stays as it is: nvme_budget 1048576 is too small"):
        await smaller.reload()
    assert quotas.of("job").sessions == 1
    assert await Configuration(first, lambda: config(2), quotas, refuse, lends_nothing).reload() == (["quotas"], [])


async def test_of_two_calls_at_once_the_later_one_counts() -> None:
    """The first call reads slowly, and must not take an older configuration over after that of the second call."""
    first = config(1)
    written = [config(2)]
    is_read, may_return = threading.Event(), threading.Event()

    def read_slowly_at_first() -> DaemonConfig:
        found = written[-1]
        if len(written) == 1:
            is_read.set()
            assert may_return.wait(30)
        return found

    quotas = Quotas(first.quotas)
    configuration = Configuration(first, read_slowly_at_first, quotas, carries_anything, lends_nothing)
    earlier = asyncio.ensure_future(configuration.reload())
    await asyncio.to_thread(is_read.wait, 30)
    written.append(config(3))
    later = asyncio.ensure_future(configuration.reload())
    # Without turns, the later call ends within this time.
    await asyncio.wait([later], timeout=0.2)
    may_return.set()
    await asyncio.gather(earlier, later)
    assert quotas.of("job").sessions == 3 and configuration.present.quotas.default.sessions == 3
