"""The names of all time series that a daemon shows, for tests of what queries them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paramserver.metrics import families
from paramserver.metrics.durations import Durations


def known_names() -> set[str]:
    """Return the names of all series of a daemon."""
    registry = CollectorRegistry()
    Durations(registry)
    of_histograms = {
        f"{family.name}{ending}" for family in registry.collect() for ending in ("_bucket", "_sum", "_count", "_total")
    }
    return {*families.meanings(), *of_histograms, "paramserver_jobs", "paramserver_build_info"}
