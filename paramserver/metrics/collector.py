"""The collector that reads the store when a monitoring system asks.

This module owns nothing. The store's objects belong to the event loop, so the readings are taken there, whichever
thread asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from paramserver.metrics import families
from paramserver.process.background import run_on_loop
from paramserver.services.store_view import StoreView
from paramserver.v1 import store_admin_pb2 as admin_pb


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readings:
    tiers: admin_pb.GetTiersResponse
    sessions: Sequence[admin_pb.SessionInfo]
    lost_sessions: int
    jobs: Sequence[admin_pb.JobInfo]
    all_jobs: int


_NOTHING = _Readings(tiers=admin_pb.GetTiersResponse(), sessions=(), lost_sessions=0, jobs=(), all_jobs=0)


class StoreCollector(Collector):
    """The object that the registry of prometheus_client asks for the metrics of the store at each scrape."""

    def __init__(self, view: StoreView, loop: asyncio.AbstractEventLoop, version: str, most_jobs: int) -> None:
        """Make a collector.

        Args:
            view: the store's readings.
            loop: the event loop on which the readings may be taken.
            version: the daemon's version.
            most_jobs: the number of jobs that have metrics of their own: those with sessions first, then those with the
                newest commits. The limit bounds the number of time series.
        """
        self._view = view
        self._loop = loop
        self._version = version
        self._most_jobs = most_jobs

    def describe(self) -> Iterable[Metric]:
        """Yield all metrics, without a reading, because no reading can be taken when the collector is registered.

        The registry takes the names of the metrics from what this yields. Without these names, the registry would leave
        this collector out of each scrape that asks for metrics by name.
        """
        return self._families(_NOTHING)

    def collect(self) -> Iterable[Metric]:
        """Return all metrics of one reading. Do not call this on the event loop's thread.

        Raises:
            TimeoutError: the event loop did not answer in time.
        """
        return self._families(run_on_loop(self._read(), self._loop))

    def _families(self, readings: _Readings) -> Iterable[Metric]:
        build = InfoMetricFamily(f"{families.PREFIX}build", "The daemon's version.")
        build.add_metric((), {"version": self._version})
        yield build
        for figure in families.DAEMON:
            yield figure.family((), [((), readings.tiers)])
        yield from families.tier_families(readings.tiers.tiers)
        for of_sessions in families.SESSIONS:
            yield of_sessions.family((), [((), readings.sessions)])
        yield CounterMetricFamily(families.LOST_SESSIONS, families.LOST_SESSIONS_MEANING, value=readings.lost_sessions)
        yield GaugeMetricFamily(f"{families.PREFIX}jobs", "Jobs in the catalog.", value=readings.all_jobs)
        yield from families.job_families(readings.jobs)

    async def _read(self) -> _Readings:
        jobs, all_jobs = await self._view.leading_jobs(self._most_jobs)
        return _Readings(
            tiers=self._view.tiers(),
            sessions=self._view.sessions(),
            lost_sessions=self._view.lost_sessions,
            jobs=jobs,
            all_jobs=all_jobs,
        )
