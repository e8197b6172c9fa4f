"""The figures of the page as one JSON document, which is made anew at most once a second, however many pages ask.

docs/page.md lists the document's fields. A later version may add fields, and never removes one. This module owns the
last document. It must bound every list in it, because clients choose the names and the number of jobs, sessions and
events.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from paramserver.contract.durability import durability_text
from paramserver.contract.words import word_of
from paramserver.events import EventKind, EventLog
from paramserver.page.history import INTERVAL_SECONDS, MOST_DEVICES, History
from paramserver.page.roofline import describe_step, steps_per_minute
from paramserver.page.steps import Step, StepLog
from paramserver.process.background import run_on_loop
from paramserver.process.loop_watch import LoopWatch
from paramserver.services.store_view import StoreView
from paramserver.sessions.session_state import SessionState
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.engine import Engine

FORMAT = 1
# The page's document is made anew when a browser requests it and the last one is older than this.
FRESH_SECONDS = 1.0
MOST_JOBS = 50
MOST_PROBLEMS = 20
MOST_SILENT = 10
# The most events that the page shows, and the most of them that report commits. Commits have a lower limit, because a
# job that commits often would leave no room for other events.
MOST_EVENTS = 50
MOST_COMMIT_EVENTS = 10
# The page shows a client as silent once this many of its heartbeats have not come.
MISSED_HEARTBEATS = 2

Document = dict[str, Any]


class PageData:
    """The object that gives the page its figures of one daemon, as a JSON document."""

    def __init__(
        self,
        *,
        engine: Engine,
        sessions: Sessions,
        view: StoreView,
        watch: LoopWatch,
        events: EventLog,
        steps: StepLog,
        history: History,
        version: str,
        address: str,
        heartbeat_seconds: float,
    ) -> None:
        """Make the object for a daemon that runs on the running event loop, on which the figures are read.

        Args:
            address: where trainers of this node find the daemon.
            heartbeat_seconds: the interval at which clients send heartbeats.
        """
        self._engine = engine
        self._sessions = sessions
        self._view = view
        self._watch = watch
        self._events = events
        self._steps = steps
        self._history = history
        self._silent_after_seconds = MISSED_HEARTBEATS * heartbeat_seconds
        self._loop = asyncio.get_running_loop()
        self._fixed = {
            "format": FORMAT,
            "version": version,
            "address": address,
            "node": socket.gethostname(),
            "started_at": time.time(),
            "interval_seconds": INTERVAL_SECONDS,
        }
        self._document: Document = {}
        self._made_at = float("-inf")
        self._making = asyncio.Lock()

    def to_json(self, since: int) -> bytes:
        """Return the document, with the samples from number `since` on. Do not call this on the event loop's thread.

        Raises:
            TimeoutError: the event loop did not answer in time.
        """
        document = run_on_loop(self._read(since), self._loop)
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()

    async def _read(self, since: int) -> Document:
        async with self._making:
            if self._loop.time() - self._made_at >= FRESH_SECONDS:
                self._document = await self._make()
                self._made_at = self._loop.time()
        history = self._history
        samples = {"columns": history.columns, "next": history.next_number, "rows": history.since(since)}
        return self._document | {"history": samples}

    async def _make(self) -> Document:
        jobs, all_jobs = await self._view.leading_jobs(MOST_JOBS)
        reading = self._view.tiers()
        bandwidth = self._engine.nvme.bandwidth
        return self._fixed | {
            "time": reading.unix_seconds,
            "epoch": reading.epoch,
            "state_dir": reading.state_dir,
            "sessions": self._describe_sessions(),
            "transfers": {"used_bytes": reading.transfer_bytes, "budget_bytes": reading.transfer_budget_bytes},
            "tiers": [_describe_tier(tier) for tier in reading.tiers],
            "devices": self._describe_devices(),
            "jobs": [_describe_job(job, self._steps.of_job(job.name), bandwidth) for job in jobs],
            "all_jobs": all_jobs,
            "stalls": self._describe_stalls(reading),
            "events": self._describe_events(),
        }

    def _describe_sessions(self) -> Document:
        now = self._loop.time()
        silent = [(now - session.heard_at, session) for session in self._sessions]
        silent = [(seconds, session) for seconds, session in silent if seconds >= self._silent_after_seconds]
        silent.sort(key=lambda pair: pair[0], reverse=True)
        return {
            "open": len(self._sessions),
            "detached": sum(session.state is SessionState.DETACHED for session in self._sessions),
            "silent": len(silent),
            "silent_after_seconds": self._silent_after_seconds,
            "longest_silent": [
                {"client": session.client, "job": session.run.spec.name if session.run else None, "seconds": seconds}
                for seconds, session in silent[:MOST_SILENT]
            ],
        }

    def _describe_devices(self) -> Sequence[Document]:
        return [
            {
                "path": str(file.path),
                "used_bytes": file.used_bytes,
                "size_bytes": file.size_bytes,
                "direct": file.direct,
                "queue": load.queued,
                "in_flight_bytes": load.bytes_in_flight,
                "stalled_seconds": load.stalled_seconds,
                "measured_bytes_per_second": file.bandwidth,
            }
            for file in self._engine.nvme.files[:MOST_DEVICES]
            for load in (file.io.load,)
        ]

    def _describe_stalls(self, reading: admin_pb.GetTiersResponse) -> Document:
        host = self._engine.host
        return {
            "event_loop": {"count": self._watch.stalls, "longest_seconds": self._watch.longest_stall_seconds},
            "room": {
                "seconds": host.waiting.elapsed,
                "waiting": host.queue_depth,
                "oldest_seconds": host.waiting_seconds,
            },
            "fetch": {
                "seconds": self._steps.waiting_seconds,
                "oldest_seconds": max(
                    (device.stalled_seconds for tier in reading.tiers for device in tier.devices), default=0.0
                ),
            },
        }

    def _describe_events(self) -> Sequence[Document]:
        others = [kind for kind in EventKind if kind is not EventKind.COMMIT]
        shown = [
            *self._events.recent(MOST_EVENTS, kinds=others),
            *self._events.recent(MOST_COMMIT_EVENTS, kinds=[EventKind.COMMIT]),
        ]
        return [
            {
                "number": event.number,
                "time": event.time,
                "kind": event.kind.value,
                "subject": event.subject,
                "text": event.text,
            }
            for event in sorted(shown, key=lambda event: event.number, reverse=True)
        ]


def _describe_tier(tier: admin_pb.TierInfo) -> Document:
    problems = list(tier.problems)
    shown = problems[:MOST_PROBLEMS]
    if more := len(problems) - len(shown):
        shown.append(f"and {more} more problems")
    return {
        "name": word_of(pb.Tier, tier.tier),
        "detail": tier.detail,
        "budget_bytes": tier.budget_bytes,
        "used_bytes": tier.used_bytes,
        "leased_bytes": tier.leased_bytes,
        "evictable_bytes": tier.evictable_bytes,
        "quarantined_bytes": tier.quarantined_bytes,
        "gradient_bytes": tier.gradient_bytes,
        "bad_bytes": tier.bad_bytes,
        "free_bytes": max(0, tier.budget_bytes - tier.used_bytes),
        "queue": tier.queue_depth,
        "hits": tier.hits,
        "misses": tier.misses,
        "read_bytes": tier.bytes_read,
        "written_bytes": tier.bytes_written,
        "damaged_blocks": tier.damaged_blocks,
        "problems": shown,
    }


def _describe_job(job: admin_pb.JobInfo, steps: Sequence[Step], bandwidth: float) -> Document:
    return {
        "name": job.name,
        "ranks": job.world_size,
        "sessions": job.sessions,
        "parameters": job.parameters,
        "durability": durability_text(job.durability),
        "committed_step": job.committed_step if job.HasField("committed_step") else None,
        "committed_at": job.committed_at_unix_seconds if job.HasField("committed_at_unix_seconds") else None,
        "durable_step": job.durable_step if job.HasField("durable_step") else None,
        "kept_steps": job.kept_steps,
        "bytes": {word_of(pb.Tier, part.tier): part.bytes for part in job.bytes},
        "steps_per_minute": steps_per_minute(steps, time.monotonic()),
        "recent_seconds": [round(step.seconds, 4) for step in steps if step.seconds is not None],
        "step": describe_step(steps, bandwidth),
    }
