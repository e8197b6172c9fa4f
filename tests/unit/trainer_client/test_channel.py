"""Addresses are checked before anything is tried, and an unreachable daemon is named with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_client.errors import ConfigError, StoreUnavailableError
from trainer_client.link.channel import check_address, wait_until_serving
from trainer_client.link.rank_store import RankStore


@pytest.mark.parametrize("address", ["unix:/run/p/paramserver.sock", "localhost:50051", "[::1]:50051"])
def test_good_addresses(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize("address", ["", "localhost", ":50051", "host:port", "host:0", "host:65536", "unix:relative"])
def test_bad_addresses_are_refused_with_their_text(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_address(address)

    assert repr(address) in str(caught.value)


def test_a_socket_path_that_the_system_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        check_address("unix:/" + "d" * 107)


def test_an_unreachable_daemon_is_named_with_the_remedy(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/none.sock"

    with pytest.raises(StoreUnavailableError, match="paramserver serve"):
        wait_until_serving(address, timeout_seconds=0.1)
    with pytest.raises(StoreUnavailableError):
        RankStore(address, "test")
