"""How many boundaries of checkpoints are recalled ahead."""

from __future__ import annotations

from trainer_client.base.recorder import HostStopwatch
from trainer_client.training.step.recall_depth import RecallDepth

BYTES = 1 << 20


def test_the_depth_falls_with_each_refused_recall_and_rises_again_while_none_is_refused() -> None:
    depth = RecallDepth(HostStopwatch)
    for _ in range(20):
        depth.begin(stalled=True)
    deep = depth.resize(BYTES)
    assert deep > 2
    for fewer in range(1, deep):
        depth.limit()
        assert depth.resize(BYTES) == deep - fewer
    depth.limit()
    assert depth.resize(BYTES) == 1
    depths = []
    for _ in range(640):
        depth.begin(stalled=True)
        depths.append(depth.resize(BYTES))
    assert depths == sorted(depths)
    assert depths[62] == 1
    assert depths[-1] == deep
