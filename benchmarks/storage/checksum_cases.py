"""What verification costs: the tier's checksums alone, on one thread, over buffers of the sizes that it reads."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.common.measure import GB, Sample, Stopwatch, summary
from storage.integrity import Checksums

BUFFER_BYTES = 64 << 20


def run(rounds: int, read_cpu_seconds_per_gb: float, piece_bytes: int) -> dict[str, Any]:
    """Records and verifies a buffer in pieces of `piece_bytes`, `rounds` times after a warm-up.

    `share_of_read_cpu`: what part of the CPU time of a verified read through the tier is verification.
    """
    data = memoryview(np.random.default_rng(1).bytes(BUFFER_BYTES))
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    checksums = [Checksums(f"piece {i}", len(piece)) for i, piece in enumerate(pieces)]
    record, verify = [], []
    for _ in range(rounds + 1):
        with Stopwatch() as watch:
            for known, piece in zip(checksums, pieces, strict=True):
                known.record(0, piece)
        record.append(watch.sample(len(data)))
        with Stopwatch() as watch:
            for known, piece in zip(checksums, pieces, strict=True):
                known.verify(0, piece)
        verify.append(watch.sample(len(data)))
    return {
        "piece_bytes": piece_bytes,
        "record": summary(record[1:]),
        "verify": summary(verify[1:]),
        "share_of_read_cpu": round(_cpu_per_gb(verify[1:]) / read_cpu_seconds_per_gb, 4),
    }


def _cpu_per_gb(samples: list[Sample]) -> float:
    return statistics.median(sample.cpu_seconds / (sample.nbytes / GB) for sample in samples)
