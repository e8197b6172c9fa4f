"""The store's side of a training step, for the trainers: counters of the tiers, and the spans of the trainer's job.

This module owns the spans that wait until a session collects them, whose number is bounded. It must never keep spans
for a session that does not ask for them, and must never give a session the spans of another job.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import TIER_TO_WIRE
from storage.base.tracing import Span, Tracer
from storage.engine import Engine
from storage.memory.parkable import Activation
from storage.tiers.contract import Tier

# The most spans that the daemon keeps for one session between two calls of CollectSpans. They take a third of the
# largest message.
MAX_SPANS = 50_000
# The most spans that the daemon keeps for all sessions together. They take some 30 MB.
MAX_SPANS_OF_ALL = 2 * MAX_SPANS


@dataclass(slots=True, eq=False)
class _Collection:
    job: str
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0


class Traces:
    """The spans that wait for the sessions which collect them.

    Its methods are called on the event loop; the engine's spans may come from any thread.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._collections: dict[str, _Collection] = {}
        self._listens = False

    def collect(self, session_id: str, job: str, *, ends: bool) -> pb.CollectSpansResponse:
        """Return the spans of a job since the session's last call, and keep later spans for its next call.

        The first call of a session returns no spans.

        Args:
            session_id: the session that collects.
            job: the identity of the session's job.
            ends: whether this is the session's last call, so that no further spans are kept for it.
        """
        collected = self._collections.pop(session_id, None) or _Collection(job)
        if not ends:
            self._collections[session_id] = _Collection(job)
        self._listen_if_wanted()
        return pb.CollectSpansResponse(
            spans=[_span_to_wire(span) for span in collected.spans],
            dropped=collected.dropped,
            monotonic_seconds=time.monotonic(),
        )

    def end_session(self, session_id: str) -> None:
        """Discard the spans that are kept for a session that has ended."""
        if self._collections.pop(session_id, None) is not None:
            self._listen_if_wanted()

    def _listen_if_wanted(self) -> None:
        if self._collections and not self._listens:
            self._tracer.listen(self._on_span)
        elif self._listens and not self._collections:
            self._tracer.ignore(self._on_span)
        self._listens = bool(self._collections)

    def _on_span(self, span: Span) -> None:
        # This method runs on the thread that ended the span. It iterates over a copy of the collections, because the
        # event loop's thread may add or remove some meanwhile.
        collections = list(self._collections.values())
        is_room = sum(len(collection.spans) for collection in collections) < MAX_SPANS_OF_ALL
        for collection in collections:
            if collection.job != span.job:
                continue
            if is_room and len(collection.spans) < MAX_SPANS:
                collection.spans.append(span)
            else:
                collection.dropped += 1


def read_counters(engine: Engine) -> pb.ReadCountersResponse:
    """Return the present values of the tiers' counters, such as bytes read, which count all jobs together."""
    return pb.ReadCountersResponse(
        tiers=[_counters(tier) for tier in engine.tiers],
        monotonic_seconds=time.monotonic(),
        spilled_activation_bytes=engine.gradients.spilled_ever[Activation],
    )


def _counters(tier: Tier) -> pb.ReadCountersResponse.TierCounters:
    counters = tier.counters
    return pb.ReadCountersResponse.TierCounters(
        tier=TIER_TO_WIRE[tier.name],
        bytes_read=counters.bytes_read,
        bytes_written=counters.bytes_written,
        read_seconds=counters.reading.elapsed,
        write_seconds=counters.writing.elapsed,
        fetch_seconds=counters.fetching.elapsed,
        bytes_per_second=tier.bandwidth,
    )


def _span_to_wire(span: Span) -> pb.CollectSpansResponse.Span:
    return pb.CollectSpansResponse.Span(
        activity=span.activity.value,
        subject=span.subject,
        began_seconds=span.began_seconds,
        ended_seconds=span.ended_seconds,
        size_bytes=span.nbytes,
    )
