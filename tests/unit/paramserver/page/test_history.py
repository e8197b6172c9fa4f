"""The samples of the page have the traffic of each tier that the page shows."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paramserver.page.history import History
from paramserver.page.steps import StepLog
from paramserver.process.loop_watch import LoopWatch
from tests.unit.paramserver.sessions.builders import sessions_of
from tests.unit.storage.test_remote_tier import paired, trained


async def test_every_tier_of_the_page_has_its_traffic(tmp_path: Path) -> None:
    """A tier without columns would be shown as one that moves nothing."""
    async with paired(tmp_path) as pair:
        engine = pair.borrower
        watch = LoopWatch(asyncio.get_running_loop(), lambda _: None)
        history = History(engine, sessions_of(engine), watch, StepLog(lambda _: None))
        await trained(pair)
        await history.take()
        (row,) = history.since(0)
        sample = dict(zip(history.columns, row, strict=True))
        below = [str(tier.name) for tier in engine.tiers if tier is not engine.host]

    assert below == ["remote", "nvme"]
    for name in below:
        assert sample[f"{name}_written_bytes_per_second"] > 0 and sample[f"{name}_used_bytes"] > 0
    # The gpu tier is shown once a client offers memory of its device, and the columns stay as they are.
    for name in ("gpu", *below):
        columns = {f"{name}_{figure}" for figure in ("read_bytes_per_second", "written_bytes_per_second", "queue")}
        assert columns <= sample.keys()
