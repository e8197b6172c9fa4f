"""Daemons that have room for what ranks park, and too little, and the check that nothing of it is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import MIB, Daemon, admin_of, tiers

PLENTY = 64 * MIB


@contextmanager
def small_and_plenty(directory: Path, small_budget: int) -> Iterator[tuple[Daemon, Daemon]]:
    """Yield a daemon with this host budget, and one with PLENTY."""
    with (
        Daemon(directory / "small", {"host_budget": small_budget, "nvme_budget": "1GiB"}) as small,
        Daemon(directory / "plenty", {"host_budget": PLENTY, "nvme_budget": "1GiB"}) as plenty,
    ):
        yield small, plenty


def assert_nothing_left(daemon: Daemon) -> None:
    """Check that no gradient, no activation and no lease is left, and that a holder explains every byte."""
    until = time.monotonic() + 30
    while True:
        with admin_of(daemon.address) as admin:
            accounts = admin.GetAccounts(admin_pb.GetAccountsRequest(), timeout=30).accounts
        parked = [tier.gradient_bytes + tier.activation_bytes for tier in tiers(daemon.address)]
        left = [
            (pb.Tier.Name(account.tier), holding.holder, holding.bytes)
            for account in accounts
            for holding in account.holdings
            if holding.holder in ("leases", "under way", "quarantine") and holding.bytes
        ]
        if not left and not any(parked) and not any(account.unexplained_bytes for account in accounts):
            return
        assert time.monotonic() < until, (left, parked, accounts)
        time.sleep(0.05)
