"""DeepSpeed's `deepspeed.utils.timer`: the class of `engine.tput_timer`."""

from __future__ import annotations

from trainer_client.report.throughput import ThroughputTimer

__all__ = ["ThroughputTimer"]
