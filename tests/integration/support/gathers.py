"""What gathers have cost, counted over several steps for tests: the engine itself counts by step, for its report."""

from __future__ import annotations

from trainer_client import Engine
from trainer_client.step.gather_counters import GatherCounters


def count_gathers(engine: Engine) -> GatherCounters:
    """Counts from now on, and keeps the counts; the engine's reports have none of them."""
    residency = engine._hooks._residency
    residency.counters = GatherCounters([unit.fqn for unit in residency._units])
    return residency.counters
