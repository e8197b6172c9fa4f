"""A writer of Chrome traces, the JSON files that https://ui.perfetto.dev and chrome://tracing open.

The format is "Trace Event Format" (Google, 2016). The writer uses complete events ("X", in microseconds), and metadata
events ("M"), which name processes and rows. This module owns nothing. It must never leave an incomplete file under the
name that the caller gives.
"""

from __future__ import annotations

import codecs
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paramserver.contract.durable_files import replace
from trainer_client.base.recorder import TraceSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the Chrome trace: a heading with the name `name`, and the spans that the viewer shows under it.

    The times of the spans of all processes must be on one clock.
    """

    name: str
    spans: Sequence[TraceSpan]


def write_trace(path: Path, processes: Sequence[Process], began: float, rows: Sequence[str]) -> None:
    """Write the trace to `path`, atomically.

    Args:
        path: the file, which is replaced if it exists.
        processes: the processes of the trace, in the order in which the viewer shows them.
        began: the time on the spans' clock at which the trace begins, in seconds.
        rows: names of rows, in the order in which the viewer shows them under each process. Rows of spans with other
            names follow after them.

    Raises:
        OSError: the file cannot be written.
    """
    events = [event for pid, process in enumerate(processes, start=1) for event in _events(pid, process, began, rows)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    replace(path, lambda file: json.dump(trace, codecs.getwriter("utf-8")(file)))


def _events(pid: int, process: Process, began: float, rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process.name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    by_row: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in process.spans:
        by_row[span.row].append(span)
    order = {row: index for index, row in enumerate(rows)}
    tid = 0
    for row in sorted(by_row, key=lambda row: (order.get(row, len(order)), row)):
        for number, lane in enumerate(_lanes(by_row[row]), start=1):
            tid += 1
            name = row if number == 1 else f"{row} ({number})"
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            for span in lane:
                event: dict[str, Any] = {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "cat": row,
                    "name": span.name,
                    "ts": (span.began - began) * 1e6,
                    "dur": (span.ended - span.began) * 1e6,
                }
                if span.nbytes:
                    event["args"] = {"bytes": span.nbytes}
                yield event


def _lanes(spans: Iterable[TraceSpan]) -> list[list[TraceSpan]]:
    """Distribute the spans of one row over as few rows of the trace as possible, so that no two spans overlap in a row.

    The format requires that events of one row do not overlap unless one contains the other.
    """
    lanes: list[list[TraceSpan]] = []
    for span in sorted(spans, key=lambda span: (span.began, span.ended)):
        lane = next((lane for lane in lanes if lane[-1].ended <= span.began), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes
