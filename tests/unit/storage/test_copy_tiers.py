"""An engine with a small copy tier above the remote tier: the bits are torch's, whichever of them has a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.base.errors import StorageError
from storage.engine import Engine
from tests.unit.storage.builders import MIB, engine_config
from tests.unit.storage.memory_copies import MemoryCopies
from tests.unit.storage.test_remote_tier import go_on, paired, trained


async def test_each_version_is_read_from_the_tier_that_has_its_copy(tmp_path: Path) -> None:
    small = MemoryCopies(3 * MIB)
    async with paired(tmp_path, [small]) as pair:
        assert small.is_started
        training = await trained(pair)
        assert 0 < small.used_bytes < training.version_bytes
        assert small.used_bytes + pair.remote.used_bytes >= training.version_bytes
        read, hits, below = pair.borrower.nvme.counters.bytes_read, small.counters.hits, pair.remote.counters.hits
        for _ in range(2):
            await go_on(pair, training)
        assert small.counters.hits > hits and pair.remote.counters.hits > below
        assert pair.borrower.nvme.counters.bytes_read == read
        # NVMe serves the reads whose copies the small tier has lost, because the remote tier has no copies of these.
        small.is_forgetful = True
        await go_on(pair, training)
        assert pair.borrower.nvme.counters.bytes_read > read
        small.is_forgetful = False

        names = [tier.name for tier in pair.borrower.tiers]
        accounts = await pair.borrower.accountant.take()
        assert names == ["host", "gpu", "remote", "nvme"] == [account.tier for account in accounts]
        assert all(account.is_balanced for account in accounts)
        await pair.borrower.delete_job("job")
        assert small.used_bytes == pair.remote.used_bytes == 0
    assert small.is_closed


async def test_a_copy_tier_is_closed_when_the_engine_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tier = MemoryCopies(MIB)
    with pytest.raises(StorageError):
        await Engine.open(engine_config(tmp_path / "file"), (), [tier])
    assert tier.is_closed and not tier.is_started
